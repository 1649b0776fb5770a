"""Accesses of whole warps at once do what single ones do: same memory, faults and schedule.

Random kernels run twice, with the quick paths of csrc/sim/machine/quick.h and without; where
nothing is wrong, a NumPy model says what memory must hold.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run

BYTES = 1024  # of shared memory that kernels use
WARPS = 3
SHARED_START = 1024  # docs/simulator.md, S2
MODULE = f".shared .align 128 .b8 s[{BYTES}];"
REGISTERS = {1: "r", 2: "h", 4: "r", 8: "a"}


class Single:
    """A native machine without the quick paths."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def launch(self, *args: Any, **options: Any) -> Any:
        return self._native.launch(*args, quick=False, **options)


def machine(*, quick: bool, races: bool = True, seed: int = 0) -> sim.Machine:
    """A machine with or without the quick paths."""
    result = sim.Machine("100a", seed=seed, checks=sim.Checks(races=races))
    if not quick:
        result._native = Single(result._native)  # type: ignore[assignment]
    return result


@dataclass(frozen=True)
class Access:
    """One instruction; a lane is at `base + stride * ((lane * factor + shift) % modulus)`."""

    writes: bool
    element: int  # bytes
    count: int
    base: int
    stride: int
    factor: int
    shift: int
    modulus: int
    per_warp: int  # added to the address for each warp
    warps: int  # bit mask: who executes it
    lanes: int  # bit mask
    value: int

    @property
    def bytes(self) -> int:
        return self.element * self.count

    def addresses(self, warp: int) -> list[int]:
        """Offsets in shared memory, by lane."""
        return [
            self.base
            + self.per_warp * warp
            + self.stride * ((x * self.factor + self.shift) % self.modulus)
            for x in range(32)
        ]

    def text(self, space: str) -> str:
        """PTX on one line; lane is r15, warp r14; what was loaded is folded into r13."""
        kind = f"{'.v' + str(self.count) if self.count > 1 else ''}.b{8 * self.element}"
        name = REGISTERS[self.element]
        names = [f"{name}{(0 if name == 'h' else 3) + k}" for k in range(self.count)]
        operand = "{" + ", ".join(names) + "}" if self.count > 1 else names[0]
        lines = [
            f"mad.lo.u32 r0, r15, {self.factor}, {self.shift}; rem.u32 r0, r0, {self.modulus};"
            f"mad.lo.u32 r0, r0, {self.stride}, {self.base};"
            f"mad.lo.u32 r0, r14, {self.per_warp}, r0;"
            f"mov.u32 r1, s; add.u32 r0, r0, r1;"
            f"shr.b32 r1, {self.warps}, r14; and.b32 r1, r1, 1; shr.b32 r2, {self.lanes}, r15;"
            f"and.b32 r1, r1, r2; and.b32 r1, r1, 1; setp.ne.u32 p, r1, 0;"
        ]
        if space == "generic":
            lines.append("cvt.u64.u32 a1, r0; cvta.shared.u64 a1, a1;")
        place = "[a1]" if space == "generic" else "[r0]"
        suffix = "" if space == "generic" else ".shared"
        if self.writes:
            for k, register in enumerate(names):
                # The value depends on lane, warp and element.
                lines.append(
                    f"mad.lo.u32 r2, r15, 77, {self.value + 1000 * k};mad.lo.u32 r2, r14, 9001, r2;"
                )
                lines.append(
                    {"r": f"mov.b32 {register}, r2;", "h": f"cvt.u16.u32 {register}, r2;",
                     "a": f"cvt.u64.u32 {register}, r2;"}[name]
                )  # fmt: skip
            return " ".join([*lines, f"@p st{suffix}{kind} {place}, {operand};"])
        for register in names:
            lines.append(f"mov.b{8 * max(self.element, 2) if name != 'r' else 32} {register}, 0;")
        lines.append(f"@p ld{suffix}{kind} {operand}, {place};")
        for register in names:
            lines.append(f"cvt.u32.u{ {'r': 32, 'h': 16, 'a': 64}[name]} r2, {register};"
                         if name != "r" else f"mov.b32 r2, {register};")  # fmt: skip
            lines.append("mad.lo.u32 r13, r13, 31, r2;")
        return " ".join(lines)

    def model(self, memory: np.ndarray, digest: np.ndarray, warp: int) -> None:
        """What one warp's instruction does to memory and to its lanes' digests."""
        for lane, address in enumerate(self.addresses(warp)):
            active = self.warps >> warp & self.lanes >> lane & 1
            for k in range(self.count):
                place = slice(address + k * self.element, address + (k + 1) * self.element)
                if self.writes:
                    value = (lane * 77 + self.value + 1000 * k + warp * 9001) & 0xFFFF_FFFF
                    value &= 0xFFFF if self.element == 2 else 0xFFFF_FFFF
                    if active:
                        memory[place] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)[
                            : self.element
                        ]
                else:
                    bits = int.from_bytes(memory[place].tobytes(), "little") if active else 0
                    old = int(digest[warp * 32 + lane])
                    digest[warp * 32 + lane] = (old * 31 + (bits & 0xFFFF_FFFF)) & 0xFFFF_FFFF


def draw(rng: np.random.Generator, *, clean: bool) -> Access:
    """A random access; a clean one is aligned, inside, and in its warp's part of the memory."""
    element = int(rng.choice([1, 2, 4, 8]))
    count = min(int(rng.choice([1, 1, 2, 4])), 16 // element)  # 128 bits at most
    size = element * count
    third = BYTES // 4 // 32 * 32
    room = third // size
    pattern = int(rng.integers(4))
    factor, shift = [(1, 0), (1, int(rng.integers(32))), (int(rng.integers(64)), 3), (0, 0)][
        pattern
    ]
    stride = size * int(rng.choice([1, 1, 2, 3]))
    modulus = max(1, min(int(rng.choice([2, 8, 32, 64])), third // stride))
    base = size * int(rng.integers(max(1, room - stride // size * (modulus - 1))))
    per_warp = third
    if not clean:
        per_warp = int(rng.choice([third, 0, size, 4, 2]))
        base += int(rng.choice([0, 0, 0, 0, 1, 2, BYTES - third]))
    lanes = [
        0xFFFF_FFFF,
        0xFFFF_FFFF,
        0xFFFF,
        int(rng.integers(1, 2**32)),
        1 << int(rng.integers(32)),
    ]
    warps = 7 if clean else int(rng.choice([7, 7, 1, 2, 4, 3]))
    return Access(
        bool(rng.integers(2)), element, count, base, stride, factor, shift, modulus, per_warp,
        warps, lanes[int(rng.integers(len(lanes)))], int(rng.integers(2**20)),
    )  # fmt: skip


def kernel(accesses: list[Access | None], space: str, fill: bool) -> str:
    """The accesses in order, None a barrier; then the digests and all of shared memory go out."""
    head = (
        "mov.u32 r15, %laneid; mov.u32 r14, %warpid; mov.u32 r13, 7; mov.u32 r12, %tid.x;"
        "mov.u32 r11, s;"
    )
    # Every byte by one thread: 96 threads, words of 4 bytes.
    each = "".join(
        f"mad.lo.u32 r10, r12, 4, {384 * i}; setp.lt.u32 q, r10, {BYTES}; add.u32 r9, r10, r11;"
        f"cvt.u64.u32 a1, r10; add.u64 a1, a0, a1; {{}}"
        for i in range(3)
    )
    wipe = each.replace("{}", "@q st.shared.b32 [r9], r10;") if fill else ""
    out = (
        each.replace("{}", "@q ld.shared.b32 r8, [r9]; @q st.global.b32 [a1+384], r8;")
        if fill
        else ""
    )
    return (
        f"ld.param.u64 a0, [y]; {head} {wipe} bar.sync 0;\n"
        + "\n".join("bar.sync 0;" if a is None else a.text(space) for a in accesses)
        + f"\nbar.sync 0; {out} mul.wide.u32 a1, r12, 4; add.u64 a1, a0, a1;"
        + "st.global.b32 [a1], r13;"
    )


def outcome(body: str, *, quick: bool, races: bool = True, seed: int = 0) -> Any:
    """Memory and report of a run, or its fault."""
    device = machine(quick=quick, races=races, seed=seed)
    y = device.empty(384 + BYTES, np.uint8)
    try:
        report = run(
            body, y, block=32 * WARPS, machine=device, parameters=".param .u64 y", module=MODULE
        )
    except sim.SimulationError as error:
        return error.kind, error.line, str(error), error.report
    return y.tobytes(), report


@pytest.mark.parametrize("seed", range(40))
def test_clean_kernels_equal_the_model_and_single_accesses(seed: int) -> None:
    """Each warp in a part of its own: the model's memory, and the reports of single accesses."""
    rng = np.random.default_rng(seed)
    accesses: list[Access | None] = []
    for _ in range(12):
        accesses += [draw(rng, clean=True)] + [None] * int(rng.random() < 0.2)
    body = kernel(accesses, "generic" if seed % 4 == 3 else "shared", fill=True)
    result = outcome(body, quick=True, seed=seed)
    assert result == outcome(body, quick=False, seed=seed)
    memory = np.arange(0, BYTES, 4, np.uint32).view(np.uint8).copy()
    digest = np.full(32 * WARPS, 7, np.uint32)
    for access in accesses:
        for warp in range(WARPS) if access else ():
            access.model(memory, digest, warp)
    assert result[0] == digest.tobytes() + memory.tobytes()


def test_faulty_kernels_give_the_faults_of_single_accesses() -> None:
    """Overlapping warps, odd addresses, unwritten bytes: same kind, line, text and counts."""
    kinds = set()
    for seed in range(150):
        rng = np.random.default_rng(1000 + seed)
        accesses: list[Access | None] = []
        for _ in range(int(rng.integers(2, 14))):
            accesses += [draw(rng, clean=bool(rng.random() < 0.8))] + [None] * int(
                rng.random() < 0.6
            )
        body = kernel(accesses, "generic" if seed % 4 == 3 else "shared", fill=bool(seed % 3))
        for schedule in range(2):
            result = outcome(body, quick=True, seed=schedule, races=seed % 5 != 4)
            assert result == outcome(body, quick=False, seed=schedule, races=seed % 5 != 4)
            kinds.add(result[0] if isinstance(result[0], str) else "none")
    assert kinds == {"none", "race", "misaligned", "uninitialized-memory", "out-of-bounds"}


# Bodies of two warps (r14: warp, r15: lane, r1: s) whose last line is wrong, and what is reported:
# kind, and where it is no race, line of the body and lane.
WRITE_WORDS = "setp.eq.u32 p, r14, 0; mad.lo.u32 r2, r15, 4, r1; @p st.shared.b32 [r2], r15;"
WRITE_BYTES = "setp.eq.u32 p, r14, 0; add.u32 r2, r15, r1; @p st.shared.b8 [r2], r15;"
READ_WORDS = "mad.lo.u32 r3, r15, 4, r1; @!p ld.shared.b32 r4, [r3];"
PLANTED = {
    "lane 17 of a store is outside": (
        "setp.eq.u32 p, r15, 17; selp.u32 r2, 1024, 0, p; add.u32 r2, r2, r1;"
        "st.shared.b8 [r2], r15;",
        ("out-of-bounds", 0, 17),
    ),
    "lane 9 of a store is misaligned": (
        "setp.eq.u32 p, r15, 9; selp.u32 r2, 2, 0, p; mad.lo.u32 r2, r15, 4, r2;"
        "add.u32 r2, r2, r1; st.shared.b32 [r2], r15;",
        ("misaligned", 0, 9),
    ),
    "lane 30 of a load reads what nothing wrote": (
        "setp.ne.u32 p, r15, 30; mad.lo.u32 r2, r15, 8, r1; @p st.shared.b32 [r2], r15;"
        "ld.shared.b32 r3, [r2];",
        ("uninitialized-memory", 0, 30),
    ),
    "register plus constant leaves 32 bits": (
        "mov.b32 r2, 0xFFFFFF00; ld.shared.b32 r3, [r2+2048];",
        ("out-of-bounds", 0, 0),
    ),
    "words written by one warp are read by another": (
        f"{WRITE_WORDS}\nbar.sync 0;\n{WRITE_WORDS}\nsetp.eq.u32 p, r14, 0; {READ_WORDS}",
        ("race", None, None),
    ),
    "bytes that fill words, read as words": (
        f"{WRITE_WORDS}\nbar.sync 0;\n{WRITE_BYTES}\nsetp.eq.u32 p, r14, 0; {READ_WORDS}",
        ("race", None, None),
    ),
    "one byte of a word, written while others read the word": (
        f"{WRITE_WORDS}\nbar.sync 0;\nsetp.eq.u32 p, r15, 5; setp.eq.and.u32 p, r14, 0, p;"
        "@p st.shared.b8 [r1+22], r15;\nsetp.eq.u32 p, r14, 0;" + READ_WORDS,
        ("race", None, None),
    ),
    "words read by two warps and then written": (
        f"{WRITE_WORDS}\nbar.sync 0;\nsetp.ne.u32 p, r14, r14; {READ_WORDS}\n{WRITE_WORDS}",
        ("race", None, None),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("quick", [True, False])
def test_planted_faults_are_reported(name: str, quick: bool) -> None:
    """Kind, line and lane, with and without the quick paths; a race at one of its two lines."""
    body, (kind, line, lane) = PLANTED[name]
    text = f"mov.u32 r15, %laneid; mov.u32 r14, %warpid; mov.u32 r1, s; {body}"
    for seed in range(4):
        with pytest.raises(sim.SimulationError) as caught:
            run(text, block=64, machine=machine(quick=quick, seed=seed), module=MODULE)
        assert caught.value.kind == kind
        if line is not None:
            assert caught.value.line == FIRST_LINE + line
            assert f"lane {lane};" in str(caught.value)
        else:
            last = FIRST_LINE + text.count("\n")
            assert caught.value.line in (last - 1, last)
            other = 2 * last - 1 - caught.value.line
            assert f"at PTX line {other}:" in str(caught.value)


def test_bytes_that_fill_words_need_no_barrier_before_their_own_warp() -> None:
    """Bytes, halves and words of one warp at one place, in any order, race with nothing."""
    body = (
        "mov.u32 r15, %laneid; mov.u32 r1, s; add.u32 r2, r15, r1; mad.lo.u32 r3, r15, 2, r1; "
        "mad.lo.u32 r4, r15, 4, r1; mov.b16 h0, 3; st.shared.b32 [r4], r15;"
        "st.shared.b8 [r2], r15; ld.shared.b16 h1, [r3]; st.shared.b16 [r3], h0;"
        "ld.shared.b8 r5, [r2]; ld.shared.b32 r6, [r4];"
    )
    run(body, block=32, machine=machine(quick=True), module=MODULE)


@pytest.mark.parametrize("barrier", [True, False])
def test_reads_by_several_warps_are_kept_apart_for_long(barrier: bool) -> None:
    """Thousands of rounds in which all warps read and one writes; without its barrier a race."""
    body = (
        "mov.u32 r15, %laneid; mov.u32 r14, %warpid; mov.u32 r1, s; mad.lo.u32 r2, r15, 4, r1;"
        "setp.eq.u32 p, r14, 2; mov.u32 r5, 0;\nround:\n@p st.shared.b32 [r2], r5; bar.sync 0;"
        "ld.shared.b32 r4, [r2]; add.u32 r5, r5, 1; setp.lt.u32 q, r5, 3000;"
        "@q bar.sync 0;\n@q bra round;\n"
        + ("bar.sync 0;" if barrier else "")
        + "\n@p st.shared.b32 [r2], r5;"
    )
    device = machine(quick=True)
    if barrier:
        run(body, block=32 * WARPS, machine=device, module=MODULE)
        return
    with pytest.raises(sim.SimulationError, match=r"an earlier (read|write)") as caught:
        run(body, block=32 * WARPS, machine=device, module=MODULE)
    assert caught.value.kind == "race"
    assert caught.value.line == FIRST_LINE + 5 or f"PTX line {FIRST_LINE + 5}:" in str(caught.value)


@pytest.mark.parametrize("kind", ["u32", "u8"])
def test_what_was_written_long_ago_is_remembered(kind: str) -> None:
    """After more histories than are kept at once; every round is a release of its own.

    A word, or a byte, whose word then has a history for each.
    """
    reads = f"@second ld.shared.{kind} r5, [s+1020];"
    body = f"""
.reg .pred first, second, more;
mov.u32 r0, %tid.x; mov.u32 r2, s; mad.lo.u32 r3, r0, 4, r2;
shr.u32 r6, r0, 5; add.u32 r6, r6, 1;
setp.eq.u32 first, r0, 0; setp.eq.u32 second, r0, 32;
@first st.shared.{kind} [s+1020], r0;
mov.u32 r4, 4000;
again: st.shared.u32 [r3], r4; bar.sync r6, 32;
sub.u32 r4, r4, 1; setp.ne.u32 more, r4, 0; @more bra again;
"""
    run(body, block=64, module=MODULE)
    with pytest.raises(sim.SimulationError, match="race") as found:
        run(body + reads, block=64, module=MODULE)
    assert f"st.shared.{kind} [s+1020]" in str(found.value)
    assert f"ld.shared.{kind} r5, [s+1020]" in str(found.value)
