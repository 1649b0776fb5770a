"""scaled_matmul against exact products, within the bound that the oracle derives per element.

Contract: D = cvt((alpha * sum + bias) + C) with every step one f32 rounding; leading dimensions
are batches, an operand without them is shared; formats go together where their blocks do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from oracles import gemm, quantizer
from support.jax_reference import DTYPES, SHORT, encode, gaussian, quantize_leads, same_bytes, widen

PAIRS = [(a, b) for a in fp4.FORMATS for b in fp4.FORMATS if a.block == b.block]


def interval(a: Any, b: Any, out: str = "float32", **addends: Any) -> gemm.Interval:
    """What the product of two oracle arrays may be."""
    alpha = float(np.float32(a.global_scale) * np.float32(b.global_scale))
    exact = gemm.exact_product(a.values(), b.values())
    return gemm.output_interval(exact, alpha=alpha, out=SHORT[out], **addends)


@pytest.mark.parametrize(("left", "right"), PAIRS, ids=lambda f: f.name)
def test_every_pair_of_formats(left: fp4.Format, right: fp4.Format) -> None:
    """M != N != K, K no multiple of a block, from both orientations; over half is not zero."""
    x, w = gaussian(1, (7, 77)), gaussian(2, (77, 19), "bfloat16")
    product = fp4.scaled_matmul(fp4.quantize(x, left), fp4.quantize(w, right, axis=0))
    assert (product.shape, product.dtype) == ((7, 19), jnp.float32)
    a = quantizer.quantize(widen(x), left.name)
    b = quantizer.quantize(widen(w), right.name, axis=0)
    interval(a, b).require(np.asarray(product))
    assert (np.asarray(product) != 0).mean() > 0.5


@pytest.mark.parametrize("m", [1, 33, 129])
@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("k", [1, 15, 31, 96, 160])
def test_shapes_that_no_block_divides(m: int, n: int, k: int) -> None:
    """Any M, N and K; one non-zero in the last columns is not lost (the tail of K)."""
    x = np.zeros((m, k), np.float32)
    x[:, -1] = np.arange(1, m + 1)
    w = widen(gaussian(k, (n, k)))
    product = fp4.scaled_matmul(fp4.quantize(jnp.asarray(x)), fp4.quantize(jnp.asarray(w)))
    interval(quantizer.quantize(x, "NVFP4"), quantizer.quantize(w, "NVFP4")).require(
        np.asarray(product)
    )
    assert (np.asarray(product) != 0).mean() > 0.5


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 16), (4, 0, 16), (4, 3, 0), (0, 0, 0)])
def test_zero_sizes(m: int, n: int, k: int) -> None:
    """Empty results, and zeros plus bias and accumulate where K is 0."""
    a, b = fp4.quantize(jnp.ones((m, k))), fp4.quantize(jnp.ones((n, k)))
    bias, start = jnp.arange(float(n)), jnp.ones((m, n))
    got = fp4.scaled_matmul(a, b, bias=bias, accumulate=start)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(start) + np.arange(n))


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("accumulate_dtype", [None, *DTYPES])
def test_output_dtype_bias_and_accumulate(
    out: str, bias_dtype: str | None, accumulate_dtype: str | None
) -> None:
    """Bias, then C, then one rounding to the output dtype; each in any dtype. C is not written."""
    x, w = widen(gaussian(3, (9, 48))), widen(gaussian(4, (11, 48)))
    bias = None if bias_dtype is None else gaussian(5, (11,), bias_dtype)
    start = None if accumulate_dtype is None else gaussian(6, (9, 11), accumulate_dtype)
    before = None if start is None else np.array(widen(start))
    got = fp4.scaled_matmul(
        fp4.quantize(jnp.asarray(x)), fp4.quantize(jnp.asarray(w)),
        out_dtype=jnp.dtype(out), bias=bias, accumulate=start,
    )  # fmt: skip
    assert got.dtype.name == out
    wanted = interval(
        quantizer.quantize(x, "NVFP4"),
        quantizer.quantize(w, "NVFP4"),
        out,
        bias=None if bias is None else widen(bias),
        accumulate=before,
    )
    wanted.require(widen(got))
    if before is not None:
        np.testing.assert_array_equal(widen(start), before)


LEADS = [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((), (4,)), ((4,), ()), ((1,), (1,)), ((0,), ())]


@pytest.mark.parametrize(("lead_a", "lead_b"), LEADS, ids=str)
@pytest.mark.parametrize("format", [fp4.NVFP4, fp4.MXFP8_E4M3], ids=str)
def test_leading_dimensions_and_shared_operands(
    format: fp4.Format, lead_a: tuple[int, ...], lead_b: tuple[int, ...]
) -> None:
    """Each batch element has its own scales; an operand without leading dimensions serves all."""
    x, w = gaussian(7, (*lead_a, 5, 40)), gaussian(8, (*lead_b, 6, 40))
    lead = lead_a or lead_b
    bias, start = gaussian(9, (6,)), gaussian(10, (*lead, 5, 6))
    a, b = fp4.quantize(x, format), fp4.quantize(w, format)
    got = fp4.scaled_matmul(a, b, bias=bias, accumulate=start)
    assert got.shape == (*lead, 5, 6)
    count = int(np.prod(lead))
    a_list = quantize_leads(widen(x).reshape(-1, 5, 40), format.name, axis=-1)
    b_list = quantize_leads(widen(w).reshape(-1, 6, 40), format.name, axis=-1)
    flat, starts = np.asarray(got).reshape(count, 5, 6), widen(start).reshape(count, 5, 6)
    for i in range(count):
        one = a_list[i % len(a_list)], b_list[i % len(b_list)]
        interval(*one, bias=widen(bias), accumulate=starts[i]).require(flat[i])


def test_extreme_block_scales_meet_in_the_middle() -> None:
    """MX scale bytes of 50 on one side and 204 on the other: exact, no NaN and no Inf."""
    x, w = gaussian(11, (8, 64)), gaussian(12, (8, 64))
    for format in fp4.FORMATS:
        if format.scale != "ue8m0":
            continue
        a, b = fp4.quantize(x, format), fp4.quantize(w, format)
        small = dataclasses.replace(a, scales=jnp.full_like(a.scales, 50))
        large = dataclasses.replace(b, scales=jnp.full_like(b.scales, 204))
        unit_a = dataclasses.replace(a, scales=jnp.full_like(a.scales, 127))
        unit_b = dataclasses.replace(b, scales=jnp.full_like(b.scales, 127))
        got = np.asarray(fp4.scaled_matmul(small, large))
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, np.asarray(fp4.scaled_matmul(unit_a, unit_b)))


def test_one_hot_rows_pick_their_element() -> None:
    """Element k of the other operand, for each k: an order bug in one operand cannot hide."""
    values = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.5, 6], np.float32)
    a = fp4.quantize(jnp.eye(16) * 6, amax=2688.0)
    b = fp4.quantize(jnp.asarray(values)[None], amax=2688.0)
    got = np.asarray(fp4.scaled_matmul(a, b))[:, 0]
    np.testing.assert_array_equal(got, 6 * values)


def test_negative_zero_codes_sum_to_positive_zero() -> None:
    """-0 * x is -0, and a sum of such terms is +0, as IEEE addition to +0 gives."""
    a, b = fp4.quantize(jnp.full((2, 32), -0.0)), fp4.quantize(jnp.ones((3, 32)))
    got = np.asarray(fp4.scaled_matmul(a, b))
    assert (got == 0).all() and not np.signbit(got).any()


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
def test_a_bad_block_gives_nan_in_its_row_only(format: fp4.Format) -> None:
    """NaN and Inf in one operand row make its products NaN; all other rows keep their bits."""
    x, w = np.array(widen(gaussian(13, (6, 70)))), fp4.quantize(gaussian(14, (5, 70)), format)
    good = np.asarray(fp4.scaled_matmul(fp4.quantize(jnp.asarray(x), format, **given(format)), w))
    x[2, 3], x[4, 69] = np.nan, -np.inf
    bad = np.asarray(fp4.scaled_matmul(fp4.quantize(jnp.asarray(x), format, **given(format)), w))
    assert np.isnan(bad[[2, 4]]).all()
    np.testing.assert_array_equal(bad[[0, 1, 3, 5]], good[[0, 1, 3, 5]])


def given(format: fp4.Format) -> dict[str, Any]:
    """A fixed amax where the format takes one, so that one row cannot change another."""
    return {"amax": 4.0} if format.tensor_scaled else {}


def test_vmap_over_every_operand() -> None:
    """Stacked, shared and accumulated operands under vmap equal a loop, bit for bit."""
    x, w = gaussian(15, (3, 2, 5, 40)), gaussian(16, (3, 6, 40))
    bias, start = gaussian(17, (3, 6)), gaussian(18, (3, 2, 5, 6), "bfloat16")
    a, b = jax.vmap(fp4.quantize)(x), jax.vmap(fp4.quantize)(w)
    shared = fp4.quantize(w[0])

    def call(q: Any, r: Any, bias: Any, start: Any) -> jax.Array:
        return fp4.scaled_matmul(q, r, bias=bias, accumulate=start)

    def pick(tree: Any, i: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[i], tree)

    whole = jax.vmap(call)(a, b, bias, start)
    mixed = jax.vmap(call, (0, None, None, 0))(a, shared, bias[0], start)
    biased = jax.vmap(call, (None, None, 0, None))(pick(a, 0), shared, bias, start[0])
    for i in range(3):
        same_bytes(whole[i], call(pick(a, i), pick(b, i), bias[i], start[i]))
        same_bytes(mixed[i], call(pick(a, i), shared, bias[0], start[i]))
        same_bytes(biased[i], call(pick(a, 0), shared, bias[i], start[0]))


def test_gradients_through_codes_are_refused() -> None:
    """Differentiating quantize or scaled_matmul says what to use instead."""
    x, qw = gaussian(19, (4, 32)), fp4.quantize(gaussian(20, (5, 32)))
    with pytest.raises(TypeError, match=r"cannot be differentiated.*jax_fp4\.dot|stop_gradient"):
        jax.grad(lambda v: fp4.scaled_matmul(fp4.quantize(v), qw).sum())(x)
    with pytest.raises(TypeError, match=r"cannot be differentiated.*jax_fp4\.dot"):
        jax.grad(lambda s: fp4.scaled_matmul(dataclasses.replace(qw, global_scale=s), qw).sum())(
            jnp.float32(1)
        )
    with pytest.raises(TypeError, match=r"cannot be differentiated.*stop_gradient"):
        jax.grad(lambda s: fp4.dequantize(dataclasses.replace(qw, global_scale=s)).sum())(
            jnp.float32(1)
        )
    stopped = jax.grad(
        lambda v: (fp4.scaled_matmul(fp4.quantize(jax.lax.stop_gradient(v)), qw) * v[:, :5]).sum()
    )(x)
    assert np.isfinite(np.asarray(stopped)).all()


def test_the_result_rounds_to_f16_by_overflow_to_inf() -> None:
    """Sums beyond 65504 become Inf in float16, not the largest value."""
    a = fp4.quantize(encode(np.full((1, 64), 300.0, np.float32), "float32"))
    got = widen(fp4.scaled_matmul(a, a, out_dtype=jnp.float16))
    assert np.isposinf(got).all()


def test_a_shared_operand_is_not_copied_for_every_example() -> None:
    """Under vmap an operand without a batch axis stays [1, ...] in the primitive."""
    stacked = jax.vmap(fp4.quantize)(gaussian(21, (7, 5, 40)))
    shared = fp4.quantize(jnp.ones((6, 40)))
    jaxpr = jax.make_jaxpr(jax.vmap(fp4.scaled_matmul, (0, None)))(stacked, shared)
    (call,) = [e for e in jaxpr.eqns if e.primitive.name == "jax_fp4_scaled_matmul"]
    assert [v.aval.shape[0] for v in call.invars] == [7, 7, 7, 1, 1, 1]
