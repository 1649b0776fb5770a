"""Weights quantized once: the same bits as quantizing them for every product, and never stale.

Contract: a product with quantize_weight(w) is the product with w, bit for bit, forward and
backward; gradients reach w; copies that do not belong to their master are an error, or NaN where it
is traced.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from support.jax_reference import gaussian, same_bytes

X, W = gaussian(1, (19, 48), "bfloat16"), gaussian(2, (48, 33))
WEIGHT_RECIPES = [r for r in fp4.RECIPES.values() if r.quantized]


def gradients(call: Any, x: Any, w: Any) -> Any:
    """y, dx and dw under a cotangent that depends on y."""
    y, back = jax.vjp(call, x, w)
    return y, *back(y)


@pytest.mark.parametrize("recipe", WEIGHT_RECIPES, ids=lambda r: r.name)
def test_products_and_gradients_are_those_of_the_weight_itself(recipe: fp4.Recipe) -> None:
    """Every recipe; quantized inside of the differentiated function and outside of it."""
    wanted = jax.jit(lambda: gradients(lambda x, w: fp4.dot(x, w, recipe=recipe), X, W))()

    def inside(x: Any, w: Any) -> Any:
        return fp4.dot(x, fp4.quantize_weight(w, recipe), recipe=recipe)

    q = fp4.quantize_weight(W, recipe)

    def outside(x: Any, w: Any) -> Any:
        return fp4.dot(x, q.with_master(w), recipe=recipe)

    for call in (inside, outside):
        same_bytes(jax.jit(lambda f=call: gradients(f, X, W))(), wanted)
    same_bytes(gradients(outside, X, W), wanted)
    inference = fp4.quantize_weight(W, recipe, trainable=False)
    assert inference.master is None and inference.fingerprint is None
    y, back = jax.vjp(lambda x: fp4.dot(x, inference, recipe=recipe), X)
    same_bytes((y, *back(y)), wanted[:2])


def test_every_function_takes_it_on_the_right() -> None:
    """Both axes; the orientation of the gradient is that of the weight."""
    q, qt = fp4.quantize_weight(W), fp4.quantize_weight(W.T, axis=-1)
    dims = (((1,), (0,)), ((), ()))
    wanted = fp4.dot(X, W)
    for got in (
        fp4.dot(X, q),
        fp4.matmul(X, q),
        fp4.tensordot(X, q, 1),
        fp4.dot_general(X, q, dims, preferred_element_type=jnp.float32),
        fp4.einsum("ij,jk->ik", X, q),
        fp4.inner(X, qt),
        fp4.einsum("ij,kj->ik", X, qt),
    ):
        same_bytes(got, wanted)
    same_bytes(fp4.dot(X.reshape(1, 19, 48), q)[0], wanted)
    same_bytes(fp4.scaled_matmul(fp4.quantize(X), q), fp4.scaled_matmul(fp4.quantize(X), fp4.quantize(W, axis=0, scaling="2d")))  # fmt: skip # noqa: E501
    g = jax.grad(lambda w: (fp4.inner(X, fp4.quantize_weight(w, axis=-1)) ** 2).sum())(W.T)
    same_bytes(g, jax.grad(lambda w: (fp4.inner(X, w) ** 2).sum())(W.T))
    bare = fp4.quantize(W, axis=0, scaling="2d")  # what quantize returns is taken as well
    same_bytes(fp4.dot(X, bare, preferred_element_type=jnp.float32), wanted)
    with pytest.raises(TypeError, match=r"no gradient.*quantize_weight"):
        jax.grad(lambda x: fp4.dot(x, bare).sum())(X)


def count(jaxpr: Any) -> Counter[str]:
    """How often each primitive of ours stands in a jaxpr, once for each run of a scan."""
    counts: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            for name, n in count(inner).items():
                counts[name] += n * times
    return counts


def test_accumulating_gradients_quantizes_the_weight_once() -> None:
    """Over four micro-batches in a scan: one pass over w instead of four, and the same sum."""
    xs = jnp.stack([gaussian(i, (19, 48)) for i in range(4)])

    def step(w: Any, xs: Any, once: bool) -> Any:
        q = fp4.quantize_weight(w)

        def micro(total: Any, x: Any) -> Any:
            loss = lambda w: (fp4.dot(x, q.with_master(w) if once else w) ** 2).sum()  # noqa: E731
            return total + jax.grad(loss)(w), None

        return jax.lax.scan(micro, jnp.zeros_like(w), xs)[0]

    same_bytes(jax.jit(step, static_argnums=2)(W, xs, True), jax.jit(step, static_argnums=2)(W, xs, False))  # fmt: skip # noqa: E501
    counts = [
        count(jax.make_jaxpr(step, static_argnums=2)(W, xs, once).jaxpr) for once in (True, False)
    ]
    once, often = (c["jax_fp4_quantize"] for c in counts)
    assert once == 1 + 4 * 2 and often == 1 + 4 * 3  # x and dy; with w


def test_a_stale_copy_is_refused_where_values_are_known() -> None:
    """After any change: one element, all signs, a factor of 2, two rows swapped."""
    q = fp4.quantize_weight(W)
    same_bytes(fp4.dot(X, q.with_master(jnp.array(W))), fp4.dot(X, W))
    updates = {
        "one element": W.at[5, 7].add(1e-6),
        "one bit": W.at[0, 0].set(np.nextafter(W[0, 0], np.float32(9))),
        "signs": -W,
        "factor": 2 * W,
        "rows": W[jnp.array([1, 0, *range(2, 48)])],
        "zeros": jnp.zeros_like(W),
    }
    for updated in updates.values():
        with pytest.raises(ValueError, match=r"`master`.*stale.*quantize_weight again"):
            q.with_master(updated)
    for bad in (W[:-1], W.T, W.astype(jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"`master`"):
            q.with_master(bad)
    with pytest.raises(ValueError, match="inference"):
        fp4.quantize_weight(W, trainable=False).with_master(W)


@pytest.mark.parametrize("recipe", [fp4.recipes.NVFP4, fp4.recipes.MXFP4], ids=lambda r: r.name)
def test_a_stale_copy_gives_nan_where_values_are_traced(recipe: fp4.Recipe) -> None:
    """Under jit, with the copies of an earlier step: y and both gradients are NaN."""
    q = fp4.quantize_weight(W, recipe)

    @jax.jit
    def run(q: Any, w: Any) -> Any:
        return gradients(lambda x, w: fp4.dot(x, q.with_master(w), recipe=recipe), X, w)

    wanted = jax.jit(lambda w: gradients(lambda x, w: fp4.dot(x, w, recipe=recipe), X, w))
    same_bytes(run(q, W), wanted(W))
    for leaf in run(q, W * (1 + 2.0**-20)):
        assert np.isnan(np.asarray(leaf)).all()


def test_updating_the_leaves_of_a_weight_does_not_go_unnoticed() -> None:
    """An optimizer that maps over the pytree: codes have no gradient, and a new master is seen."""
    q = fp4.quantize_weight(W)
    grads = jax.grad(lambda q: fp4.dot(X, q).sum(), allow_int=True)(q)
    assert np.asarray(grads.master).any()
    with pytest.raises((TypeError, ValueError)):
        jax.tree.map(lambda p, g: p - 0.1 * g, q, grads)
    moved = jax.tree.map(lambda p: p - 0.1 if p.shape == W.shape and p.dtype == W.dtype else p, q)
    with pytest.raises(ValueError, match="stale"):
        fp4.dot(X, moved)
    assert np.isnan(np.asarray(jax.jit(fp4.dot)(X, moved))).all()
    same_bytes(fp4.dot(X, jax.tree.map(lambda p: p, q)), fp4.dot(X, W))


def test_another_recipe_is_refused() -> None:
    """A weight is quantized for a recipe; the product has to run under it."""
    q = fp4.quantize_weight(W, fp4.recipes.MXFP4)
    with pytest.raises(ValueError, match=r"NVFP4.*MXFP4.*same recipe"):
        fp4.dot(X, q)
    with fp4.use_recipe(fp4.recipes.MXFP4):
        same_bytes(fp4.dot(X, q), fp4.dot(X, W))
        same_bytes(fp4.dot(X, fp4.quantize_weight(W)), fp4.dot(X, W))


def test_it_is_a_pytree_that_transformations_take() -> None:
    """vmap over stacked weights, scan over layers, jit boundaries, pickles."""
    ws = jnp.stack([gaussian(i, (48, 48)) for i in range(3)])
    qs = jax.jit(jax.vmap(fp4.quantize_weight))(ws)
    assert isinstance(qs, fp4.QuantizedWeight) and isinstance(qs, fp4.BlockScaledArray)
    x = X.astype(jnp.float32)
    same_bytes(
        jax.jit(lambda x: jax.lax.scan(lambda h, q: (fp4.dot(h, q), None), x, qs)[0])(x),
        jax.jit(lambda x: jax.lax.scan(lambda h, w: (fp4.dot(h, w), None), x, ws)[0])(x),
    )
    same_bytes(jax.vmap(fp4.dot, (None, 0))(x, qs), jax.vmap(fp4.dot, (None, 0))(x, ws))
    q = fp4.quantize_weight(W, trainable=False)
    restored = pickle.loads(pickle.dumps(jax.device_get(q)))
    same_bytes(fp4.dot(X, jax.tree.map(jnp.asarray, restored)), fp4.dot(X, W))
