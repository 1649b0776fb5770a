"""Weights as they are stored, in products with activations in bfloat16 and quantized ones.

Contract: the codes and scales that were given are what is multiplied; which activations they meet
is the recipe's choice (bfloat16, the weight's own format, MXFP8) and a static amax that of
`stored_weight`. `explain` shows both.
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
from support.jax_reference import SHORT, gaussian, same_bytes, widen

M, N, K = 19, 33, 80  # K is no multiple of 32: the last block is short
X, W = gaussian(1, (M, K), "bfloat16"), 0.1 * gaussian(2, (N, K))
FORMATS = [f for f in fp4.FORMATS if f.scale != "unit"]
MX = [f for f in FORMATS if f.scale == "ue8m0"]
dot = jax.jit(fp4.dot, static_argnames=("recipe", "preferred_element_type"))


def stored(format: fp4.Format, w: Any = W) -> fp4.BlockScaledArray:
    """A weight [K, N], its parts in NumPy as `checkpoint.load` returns them."""
    return jax.tree.map(np.asarray, fp4.quantize(w.T, format, axis=0))


def exact(a: np.ndarray, b: np.ndarray, out: str, alpha: float) -> gemm.Interval:
    return gemm.output_interval(gemm.exact_product(a, b), alpha=alpha, out=SHORT[out])


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_weights_beside_bfloat16_are_decoded_exactly(format: fp4.Format, out: str) -> None:
    """Recipe BF16: the sum of x times elements and scales, times the tensor scale."""
    w = quantizer.quantize(np.asarray(W), format.name)
    wanted = exact(widen(X).astype(np.float64), w.values(), out, float(w.global_scale))
    got = dot(X, stored(format), recipe=fp4.recipes.BF16, preferred_element_type=jnp.dtype(out))
    wanted.require(widen(got))
    swapped = dataclasses.replace(stored(format), values=stored(format).values ^ 1)
    wrong = dot(X, swapped, recipe=fp4.recipes.BF16, preferred_element_type=jnp.dtype(out))
    with pytest.raises(AssertionError):
        wanted.require(widen(wrong))


@pytest.mark.parametrize("format", MX, ids=str)
def test_mxfp8_activations_go_with_every_mx_weight(format: fp4.Format) -> None:
    """Recipe MXFP8 and a stored weight: the product of both, also with FP4 codes."""
    x = quantizer.quantize(widen(X), "MXFP8_E4M3")
    w = quantizer.quantize(np.asarray(W), format.name)
    got = dot(X, stored(format), recipe=fp4.recipes.MXFP8, preferred_element_type=jnp.float32)
    exact(x.values(), w.values(), "float32", 1.0).require(np.asarray(got))


def test_static_amax_replaces_that_of_the_activations() -> None:
    """NVFP4 with a given amax, below the largest activation, so that some of them saturate."""
    amax = 1.5
    w = quantizer.quantize(np.asarray(W), "NVFP4")
    x = quantizer.quantize(widen(X), "NVFP4", amax=amax)
    alpha = np.float32(x.global_scale) * np.float32(w.global_scale)
    q = fp4.stored_weight(stored(fp4.NVFP4), input_amax=amax)
    recipe = fp4.recipes.NVFP4
    got = dot(X, q, recipe=recipe, preferred_element_type=jnp.float32)
    exact(x.values(), w.values(), "float32", float(alpha)).require(np.asarray(got))
    dynamic = dot(X, stored(fp4.NVFP4), recipe=recipe, preferred_element_type=jnp.float32)
    assert not np.array_equal(got, dynamic)
    # A row depends on no other row, so that decoding token by token is decoding all of them.
    rows = [dot(X[i : i + 1], q, recipe=recipe, preferred_element_type=jnp.float32) for i in (0, 7)]
    same_bytes(jnp.concatenate(rows), got[jnp.array([0, 7])])


def test_static_amax_is_without_effect_where_nothing_has_a_tensor_scale() -> None:
    """Activations in MX formats or in bfloat16."""
    for format, recipe in ((fp4.MXFP4, fp4.recipes.MXFP8), (fp4.NVFP4, fp4.recipes.BF16)):
        q = stored(format)
        with_amax = fp4.stored_weight(q, input_amax=0.01)
        same_bytes(dot(X, with_amax, recipe=recipe), dot(X, q, recipe=recipe))
        same_bytes(dot(X, fp4.stored_weight(q), recipe=recipe), dot(X, q, recipe=recipe))


def test_explain_tells_the_ways_apart() -> None:
    """What is stored, what it meets, and whether an amax is given."""
    nvfp4, mxfp4 = stored(fp4.NVFP4), stored(fp4.MXFP4)
    static = fp4.stored_weight(nvfp4, input_amax=3.0)
    found = []
    for q, recipe in (
        (nvfp4, fp4.recipes.BF16),
        (nvfp4, fp4.recipes.NVFP4),
        (static, fp4.recipes.NVFP4),
        (static, fp4.recipes.BF16),
        (mxfp4, fp4.recipes.MXFP8),
    ):
        (p,) = fp4.explain(lambda x, q=q, r=recipe: fp4.dot(x, q, recipe=r))(X)
        found.append((p.path, p.left, p.right, p.why))
    assert found == [
        ("decoded", "bfloat16", "NVFP4 as bfloat16", "recipe BF16"),
        ("quantized", "NVFP4", "NVFP4", "recipe NVFP4"),
        ("quantized", "NVFP4 static", "NVFP4", "recipe NVFP4"),
        ("decoded", "bfloat16", "NVFP4 as bfloat16", "recipe BF16"),
        ("quantized", "MXFP8_E4M3", "MXFP4", "recipe MXFP8"),
    ]


def test_gradients_reach_the_activations_through_a_decoded_weight() -> None:
    """As through the dequantized weight, up to the rounding of products in bfloat16."""
    q = stored(fp4.NVFP4)
    x = gaussian(3, (M, K))
    dy = gaussian(4, (M, N), "bfloat16").astype(jnp.float32)
    _, back = jax.vjp(lambda x: fp4.dot(x, q, recipe=fp4.recipes.BF16), x)
    (dx,) = back(dy)
    w = quantizer.quantize(np.asarray(W), "NVFP4")
    exact(widen(dy).astype(np.float64), w.values().T, "float32", float(w.global_scale)).require(
        np.asarray(dx)
    )
    gradient = fp4.explain(jax.grad(lambda x: fp4.dot(x, q, recipe=fp4.recipes.BF16).sum()))(x)
    assert [(p.role, p.path, p.right) for p in gradient] == [
        ("fprop", "decoded", "NVFP4 as bfloat16"),
        ("dgrad", "decoded", "NVFP4 as bfloat16"),
    ]
    with pytest.raises(TypeError, match=r"no gradient.*dgrad is\s+not quantized"):
        jax.grad(lambda x: fp4.dot(x, q, recipe=fp4.recipes.NVFP4).sum())(x)


def test_every_function_and_transformation_takes_them() -> None:
    """[N, K] through inner and einsum; scan over layers with an amax each; vmap over weights."""
    recipe = fp4.recipes.NVFP4
    q = fp4.stored_weight(fp4.quantize(W, fp4.NVFP4), input_amax=2.0)
    wanted = fp4.dot(X, dataclasses.replace(q, axis=-2), recipe=recipe)
    same_bytes(fp4.inner(X, q, recipe=recipe), wanted)
    same_bytes(fp4.einsum("mk,nk->mn", X, q, recipe=recipe), wanted)
    ws = jnp.stack([gaussian(i, (K, K)) for i in range(3)])
    amax = jnp.array([4.0, 30.0, 200.0])
    stack = jax.vmap(lambda w: fp4.quantize(w, fp4.NVFP4, axis=0))(ws)
    qs = fp4.stored_weight(stack, input_amax=amax)
    x = X.astype(jnp.float32)
    scanned, _ = jax.lax.scan(lambda h, q: (fp4.dot(h, q, recipe=recipe), None), x, qs)
    one_by_one = x
    for i in range(3):
        layer = fp4.stored_weight(fp4.quantize(ws[i], fp4.NVFP4, axis=0), input_amax=amax[i])
        one_by_one = fp4.dot(one_by_one, layer, recipe=recipe)
    same_bytes(scanned, one_by_one)
    mapped = jax.vmap(lambda q: fp4.dot(X, q, recipe=fp4.recipes.BF16))(qs)
    for i in range(3):
        alone = jax.tree.map(lambda leaf, i=i: leaf[i], qs)
        same_bytes(mapped[i], fp4.dot(X, alone, recipe=fp4.recipes.BF16))


def test_weights_quantized_for_inference_go_with_other_recipes() -> None:
    """There is no master that a gradient could need; with one, the recipe is fixed."""
    for inference, other in (
        (fp4.recipes.NVFP4_RN, fp4.recipes.BF16),
        (fp4.recipes.MXFP4, fp4.recipes.MXFP8),
    ):
        q = fp4.quantize_weight(W.T, inference, trainable=False)
        bare = stored(fp4.NVFP4 if inference is fp4.recipes.NVFP4_RN else fp4.MXFP4)
        same_bytes(fp4.dot(X, q, recipe=other), fp4.dot(X, bare, recipe=other))
        with pytest.raises(ValueError, match="same recipe"):
            fp4.dot(X, fp4.quantize_weight(W.T, inference), recipe=other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp4.dot(X, stored(fp4.NVFP4), recipe=fp4.recipes.MXFP8),
         r"blocks of 32 and not rotated, as fprop_x of 'MXFP8' is, got NVFP4 in blocks of 16"),
        (lambda: fp4.dot(X, fp4.quantize(W.T, axis=0, hadamard=True), recipe=fp4.recipes.BF16),
         r"not rotated, as fprop_x of 'BF16' is, got NVFP4 in blocks of 16, rotated"),
        (lambda: fp4.stored_weight(stored(fp4.NVFP4), input_amax=0.0), r"positive, finite"),
        (lambda: fp4.stored_weight(stored(fp4.NVFP4), input_amax=jnp.inf), r"positive, finite"),
        (lambda: fp4.stored_weight(stored(fp4.NVFP4), input_amax=[1.0]), r"of shape \(\), got"),
        (lambda: fp4.stored_weight(W), r"`q` must be"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    """The argument, what was expected, and a recipe that fits."""
    with pytest.raises((TypeError, ValueError), match=message):
        call()
