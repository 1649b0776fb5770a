"""Exchange inside a warp: shfl, vote, match, redux, elect, and who takes part."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_forms import evaluate
from support.ptx_kernel import run

FULL = 0xFFFFFFFF


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The PTX ISA's pseudo-code: source lane, and whether it lies inside the segment."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    max_lane, min_lane = (lane & segment) | (clamp & ~segment & 31), lane & segment
    if mode == "up":
        j, inside = lane - b, lane - b >= max_lane
    elif mode == "down":
        j, inside = lane + b, lane + b <= max_lane
    elif mode == "bfly":
        j, inside = lane ^ b, (lane ^ b) <= max_lane
    else:
        j = min_lane | (b & ~segment)
        inside = j <= max_lane
    return (j, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    """Value and validity for whole warps and segments of 8, every offset."""
    n = 32 * 64
    lane = np.arange(n) % 32
    a = np.arange(n, dtype=np.uint32) * 7
    b = (np.arange(n) // 64).astype(np.uint32)
    c = np.where(
        np.arange(n) // 32 % 2 == 0, 0 if mode == "up" else 31, 0x1800 | (0 if mode == "up" else 31)
    ).astype(np.uint32)
    d, p = evaluate(
        f"shfl.sync.{mode}.b32 {{d0}}|{{d1}}, {{s0}}, {{s1}}, {{s2}}, {FULL};", [a, b, c], [32, 1]
    )
    for i in range(n):
        source, inside = shuffled(mode, int(lane[i]), int(b[i]), int(c[i]))
        assert d[i] == a[i - lane[i] + source] and p[i] == inside


def test_votes_and_active_mask() -> None:
    """all, any, uni, ballot, on groups of lanes with member masks of their own."""
    n = 32 * 20
    rng = np.random.default_rng(0)
    values = (rng.random(n) < np.repeat(rng.choice([0, 0.05, 0.5, 0.95, 1], n // 16), 16)).astype(
        np.uint8
    )
    members = np.where(np.arange(n) % 32 < 16, 0xFFFF, 0xFFFF0000).astype(np.uint32)
    groups = values.reshape(-1, 16)
    names = {"all": groups.all(1), "any": groups.any(1), "uni": groups.all(1) | ~groups.any(1)}
    for name, want in names.items():
        (got,) = evaluate(
            f"vote.sync.{name}.pred {{d0}}, {{s0}}, {{s1}};",
            [values, members],
            [1],
            predicates=(0,),
        )
        np.testing.assert_array_equal(got, np.repeat(want, 16))
    (got,) = evaluate(
        "vote.sync.ballot.b32 {d0}, !{s0}, {s1};", [values, members], [32], predicates=(0,)
    )
    bits = (
        (1 - values.reshape(-1, 2, 16)).astype(np.uint64)
        << (np.arange(32).reshape(2, 16).astype(np.uint64))
    ).sum(2)
    np.testing.assert_array_equal(got, np.repeat(bits.reshape(-1), 16))
    (got,) = evaluate("activemask.b32 {d0};", [np.zeros(40, np.uint32)], [32])
    assert set(got[:32]) == {FULL} and set(got[32:]) == {0xFF}


@pytest.mark.parametrize("bits", [32, 64])
def test_match(bits: int) -> None:
    """match.any groups equal values; match.all says whether there is one value."""
    rng = np.random.default_rng(1)
    a = rng.integers(0, 3, 32 * 8).astype({32: np.uint32, 64: np.uint64}[bits])
    a[:32] = 5
    (got,) = evaluate(f"match.any.sync.b{bits} {{d0}}, {{s0}}, {FULL};", [a], [32])
    warps = a.reshape(-1, 1, 32) == a.reshape(-1, 32, 1)
    want = (warps.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(2).reshape(-1)
    np.testing.assert_array_equal(got, want)
    d, p = evaluate(f"match.all.sync.b{bits} {{d0}}|{{d1}}, {{s0}}, {FULL};", [a], [32, 1])
    same = np.repeat(warps.all(axis=(1, 2)), 32)
    np.testing.assert_array_equal(p, same)
    np.testing.assert_array_equal(d, np.where(same, FULL, 0))


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_integer_reductions(op: str) -> None:
    """redux.sync over half warps."""
    rng = np.random.default_rng(2)
    x = rng.integers(0, 2**32, 32 * 10, np.uint32)
    members = np.where(np.arange(len(x)) % 32 < 16, 0xFFFF, 0xFFFF0000).astype(np.uint32)
    for kind in ("b32",) if op in ("and", "or", "xor") else ("u32", "s32"):
        typed = x.view(np.int32) if kind == "s32" else x
        want = np.repeat(
            REDUCTIONS[op].reduce(typed.reshape(-1, 16), axis=1, dtype=typed.dtype), 16
        )
        (got,) = evaluate(f"redux.sync.{op}.{kind} {{d0}}, {{s0}}, {{s1}};", [x, members], [32])
        np.testing.assert_array_equal(got, want.view(np.uint32))


@pytest.mark.parametrize("op", ["min", "max"])
def test_float_reductions(op: str) -> None:
    """redux.sync.min/max.f32 with .abs and .NaN."""
    x = np.random.default_rng(3).standard_normal(32 * 6).astype(np.float32)
    x[5], x[40:72] = np.nan, np.nan
    warps = x.reshape(-1, 32)
    for magnitude in ("", ".abs"):
        for nan in ("", ".NaN"):
            v = np.abs(warps) if magnitude else warps
            with np.errstate(invalid="ignore"):
                function = (
                    {"min": np.fmin, "max": np.fmax}[op]
                    if not nan
                    else {"min": np.minimum, "max": np.maximum}[op]
                )
                want = np.repeat(function.reduce(v, axis=1), 32)
            (got,) = evaluate(
                f"redux.sync.{op}{magnitude}{nan}.f32 {{d0}}, {{s0}}, {FULL};",
                [x.view(np.uint32)],
                [32],
            )
            np.testing.assert_array_equal(
                got, np.where(np.isnan(want), 0x7FFFFFFF, want.view(np.uint32))
            )


def test_elect_chooses_the_first_member() -> None:
    """One lane of the members has the predicate; all get its number."""
    members = np.where(np.arange(32) < 12, 0xFFF, 0xFFFFF000).astype(np.uint32)
    d, p = evaluate("elect.sync {d0}|{d1}, {s0};", [members], [32, 1])
    np.testing.assert_array_equal(d, np.where(np.arange(32) < 12, 0, 12))
    np.testing.assert_array_equal(np.flatnonzero(p), [0, 12])


def test_members_that_diverged_are_waited_for() -> None:
    """Lanes that take different ways to one shfl meet there; bar.warp.sync orders them too."""
    out = np.zeros(32, np.uint32)
    run(
        "mov.u32 r0, %tid.x; and.b32 r1, r0, 3; mov.u32 r2, 0;\n"
        "LOOP: setp.ge.u32 p, r2, r1; @p bra DONE; add.u32 r2, r2, 1; bra LOOP;\n"
        "DONE: bar.warp.sync 0xffffffff; shfl.sync.bfly.b32 r3, r2, 1, 31, 0xffffffff;\n"
        "ld.param.u64 a0, [x]; mad.wide.u32 a0, r0, 4, a0; st.global.u32 [a0], r3;",
        out, parameters=".param .u64 x",
    )  # fmt: skip
    np.testing.assert_array_equal(out, (np.arange(32) ^ 1) & 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("shfl.sync.idx.b32 r1, r0, 0, 31, 0x1;", "does not name the lane"),
        (
            "setp.lt.u32 p, r0, 16; @p shfl.sync.idx.b32 r1, r0, 0, 31, 0xffffffff;",
            "the guard keeps them from it",
        ),
        (
            "setp.lt.u32 p, r0, 16; @p bra A; shfl.sync.idx.b32 r1, r0, 0, 31, -1; bra B;\n"
            "A: shfl.sync.idx.b32 r1, r0, 0, 31, -1;\nB:",
            "lanes 0-15 are at",
        ),
        (
            "setp.lt.u32 p, r0, 16; @p exit; shfl.sync.idx.b32 r1, r0, 0, 31, -1;",
            "lane 0, which takes no part",
        ),
    ],
)
def test_wrong_member_masks_are_reported(body: str, message: str) -> None:
    """A mask without the lane itself, a guard, a divergence, a lane that has exited."""
    with pytest.raises(sim.SimulationError, match=message) as error:
        run(f"mov.u32 r0, %tid.x; {body}")
    assert error.value.kind == "divergence"
