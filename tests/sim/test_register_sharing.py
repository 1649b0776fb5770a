"""Registers that are never needed at the same time share blocks; no program can tell.

Random programs with branches that part the lanes, loops, guards and registers of 32 and 64 bits
run on the machine and in plain Python, lane by lane, with a variable for each name.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fp4 import sim

MASK = {"r": 0xFFFF_FFFF, "d": 0xFFFF_FFFF_FFFF_FFFF}
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add.u": int.__add__,
    "sub.u": int.__sub__,
    "mul.lo.u": int.__mul__,
    "xor.b": int.__xor__,
    "and.b": int.__and__,
    "or.b": int.__or__,
}
Lane = dict[str, int]
Step = Callable[[Lane], None]
HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


class Program:
    """A random kernel: its PTX, and the same as a function of a lane's variables."""

    def __init__(self, seed: int) -> None:
        """Every name is written before it is read, on each lane's own way."""
        self.random = random.Random(seed)
        self.names = {"r": 0, "d": 0, "p": 0, "L": 0}
        self.lines: list[str] = []
        self.lines.append("mov.u32 r0, %tid.x;")
        self.lines.append("cvt.u64.u32 d0, r0;")
        self.names.update(r=1, d=1)
        self.narrow_names, self.wide_names = ["r0"], ["d0"]  # defined on every way
        self.step = self.block(self.narrow_names, self.wide_names, depth=0)

    def new(self, kind: str) -> str:
        """A name that was not used before."""
        self.names[kind] += 1
        return f"{kind}{self.names[kind] - 1}"

    def block(self, narrow: list[str], wide: list[str], depth: int) -> Step:
        """Statements; what they define for sure is appended to the lists."""
        steps = [self.statement(narrow, wide, depth) for _ in range(self.random.randrange(3, 10))]

        def run(lane: Lane) -> None:
            for step in steps:
                step(lane)

        return run

    def statement(self, narrow: list[str], wide: list[str], depth: int) -> Step:
        """One of all kinds."""
        kinds = ["operate"] * 6 + ["widen", "narrow"] + ["branch", "loop"] * (depth < 2)
        return getattr(self, self.random.choice(kinds))(narrow, wide, depth)

    def operate(self, narrow: list[str], wide: list[str], _: int) -> Step:
        """D = A op B, into a new name or one that is there, perhaps under a guard."""
        kind, names = self.random.choice([("r", narrow), ("d", wide)])
        name, apply = self.random.choice(list(OPERATIONS.items()))
        a, b = self.random.choice(names), self.random.choice(names)
        known = self.random.random() < 0.4
        to = self.random.choice(names) if known else self.new(kind)
        bits = 32 if kind == "r" else 64
        guard = self.guard(narrow) if known and self.random.random() < 0.5 else None
        prefix = f"@{guard[0]} " if guard else ""
        self.lines.append(f"{prefix}{name}{bits} {to}, {a}, {b};")
        if not known:
            names.append(to)

        def run(lane: Lane) -> None:
            if guard is None or guard[1](lane):
                lane[to] = apply(lane[a], lane[b]) & MASK[kind]

        return run

    def guard(self, narrow: list[str]) -> tuple[str, Callable[[Lane], bool]]:
        """A predicate that differs from lane to lane."""
        predicate, bit, name = self.new("p"), self.new("r"), self.random.choice(narrow)
        at = self.random.randrange(5)
        self.lines += [
            f"and.b32 {bit}, {name}, {1 << at};",
            f"setp.ne.u32 {predicate}, {bit}, 0;",
        ]
        return predicate, lambda lane: (lane[name] >> at & 1) != 0

    def widen(self, narrow: list[str], wide: list[str], _: int) -> Step:
        """Two 32-bit registers become one of 64."""
        a, b, to = self.random.choice(narrow), self.random.choice(narrow), self.new("d")
        self.lines.append(f"mov.b64 {to}, {{{a}, {b}}};")
        wide.append(to)

        def run(lane: Lane) -> None:
            lane[to] = lane[a] | lane[b] << 32

        return run

    def narrow(self, narrow: list[str], wide: list[str], _: int) -> Step:
        """The halves of a 64-bit register, whose last use this may be."""
        a, low, high = self.random.choice(wide), self.new("r"), self.new("r")
        self.lines.append(f"mov.b64 {{{low}, {high}}}, {a};")
        narrow += [low, high]

        def run(lane: Lane) -> None:
            lane[low], lane[high] = lane[a] & MASK["r"], lane[a] >> 32

        return run

    def branch(self, narrow: list[str], wide: list[str], depth: int) -> Step:
        """if, else: what only one side defines is forgotten."""
        predicate, test = self.guard(narrow)
        other, end = self.new("L"), self.new("L")
        self.lines.append(f"@!{predicate} bra {other};")
        then = self.block(list(narrow), list(wide), depth + 1)
        self.lines += [f"bra {end};", f"{other}:"]
        otherwise = self.block(list(narrow), list(wide), depth + 1)
        self.lines.append(f"{end}:")
        return lambda lane: then(lane) if test(lane) else otherwise(lane)

    def loop(self, narrow: list[str], wide: list[str], depth: int) -> Step:
        """One to four rounds, other for each lane; the body may change what was there before it."""
        counter, predicate, top = self.new("r"), self.new("p"), self.new("L")
        name = self.random.choice(narrow)
        self.lines += [f"and.b32 {counter}, {name}, 3;", f"{top}:"]
        body = self.block(list(narrow), list(wide), depth + 1)
        self.lines += [
            f"sub.u32 {counter}, {counter}, 1;",
            f"setp.ge.s32 {predicate}, {counter}, 0;",
            f"@{predicate} bra {top};",
        ]

        def run(lane: Lane) -> None:
            for _ in range((lane[name] & 3) + 1):
                body(lane)

        return run

    def results(self) -> list[str]:
        """Some of the names that every lane has defined at the end."""
        names = self.narrow_names + self.wide_names
        return self.random.sample(names, min(8, len(names)))

    def lane(self, number: int) -> Lane:
        """Variables of a lane at the end."""
        lane = {"r0": number, "d0": number}
        self.step(lane)
        return lane

    def ptx(self, results: list[str]) -> str:
        """An entry k(out) that stores the names as 64-bit numbers, a row for each lane."""
        stores = []
        for i, name in enumerate(results):
            stores.append(f"{'cvt.u64.u32' if name[0] == 'r' else 'mov.b64'} w, {name};")
            stores.append(f"st.global.u64 [a+{8 * i}], w;")
        registers = {"r": "b32", "d": "b64", "p": "pred"}
        return "\n".join(
            [
                f"{HEADER}.visible .entry k(.param .u64 out) {{ .reg .b64 a, w;",
                *(
                    f".reg .{type} {kind}<{self.names[kind] + 1}>;"
                    for kind, type in registers.items()
                ),
                "ld.param.u64 a, [out];",
                "cvt.u64.u32 w, %tid.x;",
                f"mad.lo.u64 a, w, {8 * len(results)}, a;",
                *self.lines,
                *stores,
                "ret; }",
            ]
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_random_programs_compute_what_python_does(seed: int) -> None:
    """Bit for bit, in all lanes."""
    program = Program(seed)
    results = program.results()
    out = np.zeros((32, len(results)), np.uint64)
    sim.Machine("100a").load(program.ptx(results)).launch("k", 1, 32, args=[out])
    lanes = [program.lane(number) for number in range(32)]
    want = [[lane[name] for name in results] for lane in lanes]
    np.testing.assert_array_equal(out, np.array(want, np.uint64))


def test_a_register_that_was_never_written_is_reported_by_its_own_name() -> None:
    """Though others have come and gone, and it is read where they have values."""
    lines = [f"add.u32 r{i}, r{i - 1}, {i};" for i in range(1, 40)]
    text = "\n".join(
        [
            f"{HEADER}.visible .entry k() {{ .reg .b32 r<40>; .reg .b32 lost, sum;",
            ".shared .b32 s[32];",
            "mov.u32 r0, %tid.x;",
            *lines,
            "add.u32 sum, r39, lost;",
            "st.shared.u32 [s], sum;",
            "ret; }",
        ]
    )
    with pytest.raises(sim.SimulationError, match=r"register sum .* computed it from lost"):
        sim.Machine("100a").load(text).launch("k", 1, 1)


def test_a_destination_does_not_overwrite_halves_that_are_still_read() -> None:
    """The last use of a 64-bit register takes it apart; each lane's halves lie side by side."""
    text = "\n".join(
        [
            f"{HEADER}.visible .entry k(.param .u64 out) {{",
            ".reg .b32 low, high, t; .reg .b64 a, x;",
            "mov.u32 t, %tid.x;",
            "cvt.u64.u32 x, t;",
            "mul.lo.u64 x, x, 4294967299;",  # 2^32 + 3
            "mov.b64 {low, high}, x;",
            "ld.param.u64 a, [out];",
            "mad.wide.u32 a, t, 8, a;",
            "st.global.v2.b32 [a], {low, high};",
            "ret; }",
        ]
    )
    out = np.zeros((32, 2), np.uint32)
    sim.Machine("100a").load(text).launch("k", 1, 32, args=[out])
    np.testing.assert_array_equal(out[:, 0], 3 * np.arange(32))
    np.testing.assert_array_equal(out[:, 1], np.arange(32))


def test_a_guarded_write_keeps_the_old_value_for_the_next_round() -> None:
    """Nothing reads `kept` before the guarded write; other values come after its last use."""
    text = "\n".join(
        [
            f"{HEADER}.visible .entry k(.param .u64 out) {{",
            ".reg .b32 t, n, kept, seen, other<8>; .reg .b64 a; .reg .pred odd, more;",
            "mov.u32 t, %tid.x; mov.u32 n, 4; mov.u32 kept, 77;",
            "top: setp.gt.u32 odd, t, 15;",
            "@odd mov.u32 kept, n;",
            "add.u32 seen, kept, 1;",
            *(f"add.u32 other{i}, seen, {i};" for i in range(8)),
            "sub.u32 n, n, 1; setp.ne.u32 more, n, 0; @more bra top;",
            "ld.param.u64 a, [out]; mad.wide.u32 a, t, 4, a; st.global.u32 [a], seen;",
            "ret; }",
        ]
    )
    out = np.zeros(32, np.uint32)
    sim.Machine("100a").load(text).launch("k", 1, 32, args=[out])
    np.testing.assert_array_equal(out, np.where(np.arange(32) > 15, 2, 78))
