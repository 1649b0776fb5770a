"""tcgen05.mma: every kind, shape and format, bit for bit against tests/oracles.

Every run compares all of tensor memory, so that nothing but D may change, and fills everything that
an instruction does not own with noise.
"""

import numpy as np
import pytest

from oracles import mma
from support.umma import PACKED4, TYPES, Mma, Run, place, place_scales
from support.umma_forms import (
    BF16,
    F16,
    FP8,
    FP8_HALF,
    HALF,
    I8,
    MXFP4,
    MXFP8,
    NVFP4,
    PLAIN,
    SCALED,
    TF32,
    name,
)
from support.umma_problem import SFA, SFB, Instance, Problem, with_


@pytest.mark.parametrize("n", [8, 16, 24, 248, 256])
@pytest.mark.parametrize("problem", [*SCALED, *PLAIN], ids=name)
def test_one_cta(problem: Problem, n: int) -> None:
    """M = 128 at the edges of N."""
    if problem is I8 and n == 248:
        n = 240
    Instance(with_(problem, n=n), n).check(seed=n)


@pytest.mark.parametrize("base_lane", [0, 16])
@pytest.mark.parametrize("problem", PLAIN, ids=name)
def test_one_cta_with_half_the_lanes(problem: Problem, base_lane: int) -> None:
    """M = 64 takes 16 lanes of each quarter, the upper ones where the address says so."""
    Instance(with_(problem, m=64, n=32, base_lane=base_lane)).check()


@pytest.mark.parametrize(("m", "n"), [(256, 16), (256, 48), (256, 256), (128, 16), (128, 240)])
@pytest.mark.parametrize("problem", [*SCALED, *PLAIN], ids=name)
def test_two_ctas(problem: Problem, m: int, n: int) -> None:
    """Each CTA holds its rows of A and D and half of the columns of B."""
    if problem.scale and m == 128:
        m = 256
    if problem is I8:
        n = max(n // 32 * 32, 32)
    Instance(with_(problem, group=2, m=m, n=n), n).check(seed=m)


@pytest.mark.parametrize("b", TYPES)
@pytest.mark.parametrize("a", TYPES)
def test_eight_bit_formats(a: str, b: str) -> None:
    """Every pair of formats in 8-bit containers, scaled with each SF id, and unscaled."""
    number = list(TYPES).index(a) + list(TYPES).index(b)
    ids = (number % 4, (number + 1) % 4)
    Instance(with_(MXFP8, a=a, b=b, ids=ids)).check()
    Instance(with_(FP8_HALF if number % 2 else FP8, a=a, b=b)).check()


@pytest.mark.parametrize("signs", [("u8", "u8"), ("s8", "s8"), ("u8", "s8")])
@pytest.mark.parametrize("saturates", [False, True])
def test_integer_formats(signs: tuple[str, str], saturates: bool) -> None:
    """Signed and unsigned bytes; sums that leave 32 bits wrap or saturate."""
    Instance(with_(I8, a=signs[0], b=signs[1], saturates=saturates)).check()


@pytest.mark.parametrize("ids", [(0, 2), (2, 0), (2, 2)])
@pytest.mark.parametrize("form", ["kind::mxf4nvf4.block_scale.block32", MXFP4.form])
def test_scale_factor_ids_of_two_scales(form: str, ids: tuple[int, int]) -> None:
    """Half a word of scales, chosen for A and B."""
    Instance(with_(MXFP4, form=form, ids=ids)).check()


@pytest.mark.parametrize("negate", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("problem", [NVFP4, MXFP8, F16, BF16, TF32, FP8], ids=name)
def test_negation(problem: Problem, negate: tuple[bool, bool]) -> None:
    """The negate bits change the signs of A and B."""
    Instance(with_(problem, negate=negate)).check()


@pytest.mark.parametrize("problem", [NVFP4, MXFP8, HALF, I8], ids=name)
def test_without_input_d(problem: Problem) -> None:
    """A false enable-input-d starts from zero, and D need not have been written."""
    instance = Instance(with_(problem, accumulate=False))
    instance.check()
    expected = instance.expected()[:, :, :16]
    instance.mma.d = 320
    instance.run.filled = 320
    instance.run.dumped = (0, 320)
    kept = instance.run()
    np.testing.assert_array_equal(kept, instance.tensor[:, :, :320])
    instance.run.filled = None
    instance.run.dumped = (320, 32)
    np.testing.assert_array_equal(instance.run()[:, :, :16], expected)


@pytest.mark.parametrize("problem", [F16, TF32, FP8, I8, BF16], ids=name)
@pytest.mark.parametrize("group", [1, 2])
def test_a_from_tensor_memory(problem: Problem, group: int) -> None:
    """32 bytes of A in eight columns of each lane; the least significant element comes first."""
    n = 32 * group
    Instance(with_(problem, m=128 * group, n=n, group=group, tensor_a=True)).check()
    Instance(with_(MXFP8, m=128 * group, n=n, group=group, tensor_a=True)).check()


@pytest.mark.parametrize(("m", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
@pytest.mark.parametrize("problem", [F16, FP8, I8], ids=name)
@pytest.mark.parametrize("tensor_a", [False, True])
def test_disabled_lanes(problem: Problem, m: int, group: int, tensor_a: bool) -> None:
    """Lanes of the mask keep what they hold; those of the second CTA are in words 4 to 7."""
    if tensor_a and m != 128 * group:
        m = 128 * group
    words = np.random.default_rng(m + group).integers(0, 1 << 32, 4 * group)
    words[0] |= 0xFF
    mask = tuple(int(x) for x in words)
    problem = with_(problem, m=m, n=32, group=group, tensor_a=tensor_a, disabled=mask)
    Instance(problem).check()


@pytest.mark.parametrize("shrink", [0, 1, 15])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("problem", [F16, TF32, HALF], ids=name)
def test_scale_input_d(problem: Problem, shrink: int, masked: bool) -> None:
    """D counts 2^-shrink times, truncated where that is subnormal."""
    tensor_a = shrink == 1
    disabled = (0, 5, 0, 0) if masked else ()
    base = with_(problem, tensor_a=tensor_a, disabled=disabled)
    instance = Instance(with_(base, shrink=shrink))
    if problem.result == "f16":
        x = instance.c.astype(np.uint16).view(np.float16).astype(np.float64) * 2.0**-shrink
        # Toward zero on the grid of f16: multiples of 2^-24 below 2^-14.
        exponent = np.maximum(np.frexp(x)[1] - 1, -14) - 10
        instance.c = np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent).astype(np.float16)
        instance.c = (instance.c + np.float16(0)).view(np.uint16).astype(np.uint32)
    else:
        instance.c = (instance.c.view(np.float32) * np.float32(2.0**-shrink)).view(np.uint32)
    instance.check()


def test_a_chain_along_k() -> None:
    """Four steps inside a 128-byte row, each with its own scales, equal the product of K = 256."""
    rng = np.random.default_rng(11)
    a, b = (rng.integers(0, 16, (rows, 256)) for rows in (128, 64))
    sa, sb = (rng.integers(0x28, 0x48, (rows, 16)) for rows in (128, 64))
    steps = [with_(NVFP4, n=64, step=s, accumulate=s > 0) for s in range(4)]
    shared, tensor = np.zeros((1, 65536), np.uint8), np.zeros((1, 128, 512), np.uint32)
    for operand, codes in enumerate((a, b)):
        place(shared[0], codes, steps[0].descriptor(operand), PACKED4)
    mmas = []
    for s, problem in enumerate(steps):
        columns = SFA + 16 * s, SFB + 16 * s
        for column, scales in zip(columns, (sa, sb), strict=True):
            place_scales(tensor[0], column, scales[:, 4 * s : 4 * s + 4], 0)
        d = problem.descriptor
        mmas.append(Mma(problem.form, problem.idesc, d(0), d(1), 0, *columns, s > 0))
    out = Run(mmas, shared, tensor)(seed=3)
    want = mma.product_k64(*(x.astype(np.uint8) for x in (a, b, sa, sb)), "ue4m3")
    np.testing.assert_array_equal(out[0, :, :64], want)


@pytest.mark.parametrize("sum_", ["exact", "f32-chain"])
def test_other_sums(sum_: str) -> None:
    """The machine's `mma` option reaches tcgen05.mma."""
    instance = Instance(NVFP4)
    out = instance.run()
    instance.run.options["mma"] = sum_
    assert (instance.run() != out).any()


@pytest.mark.parametrize("seed", range(20))
def test_every_schedule_gives_the_same(seed: int) -> None:
    """Operations may be performed at any time before the commit arrives."""
    Instance(with_(NVFP4, n=32, m=256, group=2)).check(seed=seed)
