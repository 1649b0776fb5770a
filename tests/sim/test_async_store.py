"""st.async, red.async and cp.async.mbarrier.arrive: effects that an mbarrier announces."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import run

BOTH = ".param .u64 x, .param .u64 y"
CLUSTER = ".shared::cluster"
GENERIC = "cvt.u64.u32 a3, r3; cvta.shared.u64 a3, a3; cvt.u64.u32 a4, r4; cvta.shared.u64 a4, a4; "


def exchange(send: str, receive: str, x: np.ndarray, y: np.ndarray, count: int, **options: object):
    """Two CTAs; `send` acts on the peer's s (r3) and mbarrier (r4), `receive` reads s (r11)."""
    return run(
        "{ .shared .align 16 .b8 s[1024]; .shared .align 8 .b64 bar; .reg .b16 w<4>;"
        "ld.param.u64 a0, [x]; ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; "
        "mov.u32 r1, %cluster_ctarank; mov.u32 r10, bar; mov.u32 r11, s; "
        "mad.lo.u32 r12, r1, 32, r0; setp.eq.u32 p, r0, 0; "
        "mad.lo.u32 r13, r0, 32, r11; mov.u64 a6, 0; st.shared.v2.b64 [r13], {a6, a6}; "
        "st.shared.v2.b64 [r13+16], {a6, a6}; @p mbarrier.init.shared.b64 [r10], 1; "
        f"@p mbarrier.arrive.expect_tx.shared.b64 _, [r10], {count}; "
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; "
        "xor.b32 r2, r1, 1; mapa.shared::cluster.u32 r3, r11, r2; "
        f"mapa.shared::cluster.u32 r4, r10, r2;\n{send}\n"
        "WAIT: mbarrier.try_wait.parity.shared.b64 q, [r10], 0; @!q bra WAIT;\n"
        f"{receive} }}",
        x,
        y,
        parameters=BOTH,
        grid=2,
        cluster=2,
        **options,
    )


KINDS = [
    (f".v{n}" if n > 1 else "", kind, n, int(kind[1:]))
    for kind in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    for n in (1, 2, 4)
    if n * int(kind[1:]) <= 128
]


@pytest.mark.parametrize(("vector", "kind", "count", "bits"), KINDS)
def test_stores_arrive_with_their_bytes(vector: str, kind: str, count: int, bits: int) -> None:
    """Whoever sees the mbarrier's phase complete sees the values, in every schedule."""
    size = count * bits // 8
    x = np.random.default_rng(1).integers(0, 256, (64, size)).astype(np.uint8)
    names = ", ".join(f"v{k}" for k in range(count))
    operand = f"{{{names}}}" if vector else names
    for weak, space, seed in (
        ("", ".shared::cluster", 1),
        (".weak", ".shared::cluster", 2),
        ("", "", 3),
    ):
        generic = "" if space else GENERIC
        at, bar = ("r3", "r4") if space else ("a3", "a4")
        add = f"mad.lo.u32 r3, r0, {size}, r3;"
        y = np.zeros_like(x)
        exchange(
            f"{{ .reg .{kind} v<{count}>; mad.wide.u32 a0, r12, {size}, a0; {add} {generic} "
            f"ld.global{vector}.{kind} {operand}, [a0]; "
            f"st.async{weak}{space}.mbarrier::complete_tx::bytes{vector}.{kind} "
            f"[{at}], {operand}, [{bar}]; }}",
            f"{{ .reg .{kind} v<{count}>; mad.lo.u32 r13, r0, {size}, r11; "
            f"ld.shared{vector}.{kind} {operand}, [r13]; mad.wide.u32 a1, r12, {size}, a1; "
            f"st.global{vector}.{kind} [a1], {operand}; }}",
            x,
            y,
            32 * size,
            seed=seed,
        )
        np.testing.assert_array_equal(y, np.roll(x, 32, axis=0))


REDUCTIONS = [
    *(("inc", "u32"), ("dec", "u32")),
    *((op, kind) for op in ("min", "max") for kind in ("u32", "s32")),
    *((op, "b32") for op in ("and", "or", "xor")),
    *(("add", kind) for kind in ("u32", "s32", "u64")),
]


@pytest.mark.parametrize(("op", "kind"), REDUCTIONS)
def test_reductions_arrive_with_their_bytes(op: str, kind: str) -> None:
    """32 reductions of the peer's lanes into one cell that starts with 0."""
    dtype = {"u": np.uint32, "s": np.int32, "b": np.uint32}[kind[0]]
    dtype = np.uint64 if kind == "u64" else dtype
    x = np.random.default_rng(2).integers(-9 if kind[0] == "s" else 1, 100, 64).astype(dtype)
    bits = int(kind[1:])
    register = "a5" if bits == 64 else "r5"
    halves = x.reshape(2, 32)[::-1]
    if op in ("inc", "dec"):
        x[:] = 40  # inc to 32; dec from 0 wraps to 40, then down
        want = np.full(2, 32 if op == "inc" else 40 - 31, dtype)
    else:
        ufunc = {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                 "xor": np.bitwise_xor, "add": np.add}[op]  # fmt: skip
        want = np.stack([ufunc.reduce(np.append(half, dtype(0))) for half in halves])
    for order, space in (
        (".relaxed.cluster", ".shared::cluster"),
        ("", ".shared::cluster"),
        ("", ""),
    ):
        generic = "" if space else GENERIC
        at, bar = ("r3", "r4") if space else ("a3", "a4")
        y = np.zeros(2, dtype)
        exchange(
            f"mad.wide.u32 a0, r12, {bits // 8}, a0; ld.global.b{bits} {register}, [a0]; {generic} "
            f"red.async{order}{space}.mbarrier::complete_tx::bytes.{op}.{kind} "
            f"[{at}], {register}, [{bar}];",
            f"ld.shared.b{bits} {register}, [r11]; mad.wide.u32 a1, r1, {bits // 8}, a1; "
            f"@p st.global.b{bits} [a1], {register};",
            x,
            y,
            4 * bits,
        )
        np.testing.assert_array_equal(y, want)


STORE = "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [r3], r0, [r4];"
LOAD = "ld.shared.u32 r5, [r11]; @p st.global.u32 [a1], r5;"


def test_reading_before_the_phase_completes_is_reported() -> None:
    """Without the wait the destination counts as unwritten, or the read races with the store."""
    kinds = set()
    for seed in range(6):
        with pytest.raises(sim.SimulationError) as error:
            exchange(
                f"{STORE} {LOAD}", "", np.zeros(1, np.uint32), np.zeros(1, np.uint32), 4, seed=seed
            )
        kinds.add(error.value.kind)
    assert kinds <= {"uninitialized-memory", "race"}


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("[r4]", "[r10]", "argument", "they must be in the same one"),
        ("[r3]", "[r3+2]", "misaligned", "aligned to 4 bytes"),
    ],
)
def test_wrong_addresses_are_reported(old: str, new: str, kind: str, message: str) -> None:
    """The mbarrier lies beside the destination; the destination is aligned."""
    with pytest.raises(sim.SimulationError, match=message) as error:
        exchange(STORE.replace(old, new), LOAD, np.zeros(1, np.uint32), np.zeros(1, np.uint32), 4)
    assert error.value.kind == kind


COPY = (
    "{{ .shared .align 16 .b8 s[512]; .shared .align 8 .b64 bar; ld.param.u64 a0, [x]; "
    "ld.param.u64 a1, [y]; mov.u32 r0, %tid.x; mov.u32 r10, bar; mov.u32 r11, s; "
    "setp.eq.u32 p, r0, 0; @p mbarrier.init.shared.b64 [r10], {count}; bar.sync 0; "
    "mad.wide.u32 a0, r0, 16, a0; mad.lo.u32 r1, r0, 16, r11; "
    "cp.async.cg.shared.global [r1], [a0], 16;\n{arrive}\n"
    "WAIT: mbarrier.try_wait.parity.shared.b64 q, [r10], 0; @!q bra WAIT;\n"
    "xor.b32 r2, r0, 31; mad.lo.u32 r1, r2, 16, r11; ld.shared.v4.u32 {{r4, r5, r6, r7}}, [r1]; "
    "mad.wide.u32 a1, r0, 16, a1; st.global.v4.u32 [a1], {{r4, r5, r6, r7}}; }}"
)
ARRIVALS = [
    ("cp.async.mbarrier.arrive.noinc.shared.b64 [r10];", 32),
    ("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [r10];", 32),
    ("cvt.u64.u32 a3, r10; cvta.shared.u64 a3, a3; cp.async.mbarrier.arrive.noinc.b64 [a3];", 32),
    # Without .noinc the phase waits for one more of each thread, and for the thread's own arrival.
    (
        "cp.async.mbarrier.arrive.shared.b64 [r10]; mbarrier.arrive.shared.b64 _, [r10];",
        32,
    ),
]


@pytest.mark.parametrize(("arrive", "count"), ARRIVALS)
def test_copies_arrive_at_an_mbarrier(arrive: str, count: int) -> None:
    """Other threads read what cp.async copied once the phase has completed."""
    x = np.arange(32 * 4, dtype=np.uint32)
    for seed in range(5):
        y = np.zeros_like(x)
        run(COPY.format(arrive=arrive, count=count), x, y, parameters=BOTH, seed=seed)
        np.testing.assert_array_equal(y.reshape(32, 4), x.reshape(32, 4)[::-1])
