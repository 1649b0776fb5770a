"""ragged_dot: each group is a dot of its own, forward and backward, whatever the group sizes.

Contract: lax.ragged_dot's signature; y, dx and dw of every group lie within the bounds of the
oracle's products of that group alone, quantized with its own amax; rows behind all groups are zero;
group sizes are known on the device only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from support.jax_reference import dot_reference, gaussian, require, same_bytes

K, N = 40, 24
# Rounding to nearest everywhere, so that a group does not depend on the ones before it.
RECIPES = {
    "NVFP4": dataclasses.replace(
        fp4.recipes.NVFP4,
        name="nearest",
        dgrad_dy=fp4.Operand(fp4.NVFP4),
        wgrad_dy=fp4.Operand(fp4.NVFP4, hadamard=True),
    ),
    "MXFP4": fp4.recipes.MXFP4,
    "BF16": fp4.recipes.BF16,
    "forward only": fp4.Recipe("fwd", fp4.Operand(fp4.NVFP4), fp4.Operand(fp4.NVFP4)),
}
SIZES = {
    "empty groups": [0, 3, 0, 0, 20, 0],
    "edges of tiles": [127, 128, 129],
    "one row each": [1, 1, 1, 1],
    "all in one": [0, 260, 0],
    "rows behind": [30, 0, 5],
    "nothing": [0, 0],
}


@functools.partial(jax.jit, static_argnums=4)
def results(x: Any, w: Any, sizes: Any, dy: Any, recipe: fp4.Recipe, key: Any = None) -> Any:
    """y, dx, dw; compiled, with the sizes as an operand."""
    y, back = jax.vjp(
        lambda x, w: fp4.ragged_dot(
            x, w, sizes, preferred_element_type=dy.dtype, recipe=recipe, key=key
        ),
        x,
        w,
    )
    return y, *back(dy)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SIZES)
def test_each_group_is_a_dot_of_its_own(name: str, recipe: str) -> None:
    """Values, dx and dw against the oracle's products of the group; zeros where no group is."""
    sizes, behind = SIZES[name], 7 if name in ("rows behind", "nothing") else 0
    rows, groups = sum(sizes) + behind, len(sizes)
    x, w = gaussian(1, (rows, K), "bfloat16"), gaussian(2, (groups, K, N))
    # Groups of very different magnitudes: an amax of all of them would be seen.
    scale = np.repeat(2.0 ** (-3 * np.arange(groups)), sizes)
    x = x * jnp.asarray(np.append(scale, np.ones(behind)), jnp.bfloat16)[:, None]
    dy = gaussian(3, (rows, N))
    y, dx, dw = results(x, w, jnp.array(sizes), dy, RECIPES[recipe])
    assert (y.dtype, dx.dtype, dw.dtype) == (dy.dtype, x.dtype, w.dtype)
    start = 0
    for g, size in enumerate(sizes):
        part = slice(start, start + size)
        start += size
        if size == 0:
            assert not np.asarray(dw[g]).any()
            continue
        a, b, ct = np.asarray(x[part])[None], np.asarray(w[g]).T[None], np.asarray(dy[part])[None]
        wanted = dot_reference(a, b, ct, RECIPES[recipe], has_batch=False)
        require(wanted.y, np.asarray(y[part])[None])
        require(wanted.dlhs, np.asarray(dx[part])[None])
        require(wanted.drhs, np.asarray(dw[g]).T[None])
    assert not np.asarray(y[start:]).any() and not np.asarray(dx[start:]).any()


def test_stochastic_gradients_are_unbiased_and_reproducible() -> None:
    """The published recipe: a key decides the bits; right on average."""
    sizes, rows = jnp.array([100, 0, 60]), 160
    x, w, dy = gaussian(4, (rows, K)), gaussian(5, (3, K, N)), gaussian(6, (rows, N))
    keys = jax.random.split(jax.random.key(0), 16)
    draws = [results(x, w, sizes, dy, fp4.recipes.NVFP4, key)[1:] for key in keys]
    same_bytes(results(x, w, sizes, dy, fp4.recipes.NVFP4, keys[0])[1:], draws[0])
    from_data = results(x, w, sizes, dy, fp4.recipes.NVFP4)[1:]
    same_bytes(results(x, w, sizes, dy, fp4.recipes.NVFP4)[1:], from_data)
    nearest = results(x, w, sizes, dy, RECIPES["NVFP4"])[1:]
    for i in range(2):
        assert not np.array_equal(draws[0][i], draws[1][i])
        assert not np.array_equal(draws[0][i], from_data[i])
        exact = [np.asarray(v, np.float64) for v in
                 jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)[1](dy)]  # fmt: skip
        error = lambda v, i=i, exact=exact: np.linalg.norm(v - exact[i]) / np.linalg.norm(exact[i])  # noqa: E731
        mean = np.mean([np.asarray(d[i], np.float64) for d in draws], 0)
        assert error(mean) < 0.85 * error(np.asarray(draws[0][i], np.float64))
        assert error(mean) < 1.2 * error(np.asarray(nearest[i], np.float64))


def test_sizes_are_not_static() -> None:
    """One compiled program for all sizes; nothing about them is asked of the host."""
    traces = []

    @jax.jit
    def run(x: Any, w: Any, sizes: Any) -> Any:
        traces.append(1)
        return fp4.ragged_dot(x, w, sizes, recipe=RECIPES["MXFP4"])

    x, w = gaussian(7, (200, K)), gaussian(8, (3, K, N))
    for sizes in ([200, 0, 0], [0, 150, 50], [66, 67, 67]):
        ends = np.cumsum(sizes)
        wanted = jnp.concatenate([
            fp4.dot(x[e - s : e], w[g], recipe=RECIPES["MXFP4"])
            for g, (s, e) in enumerate(zip(sizes, ends, strict=True))
        ])  # fmt: skip
        np.testing.assert_allclose(run(x, w, jnp.array(sizes)), wanted, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([-5, 30, -(1 << 31), 20], [0, 30, 0, 20]),
        ([50, 40, 7, 3], [50, 10, 0, 0]),
        ([(1 << 31) - 1, (1 << 31) - 1, 1, -1], [60, 0, 0, 0]),
    ],
)
def test_sizes_that_cannot_be_are_cut(given: list[int], meant: list[int]) -> None:
    """Negative: none. More than there are: up to the last row. Also where their sum overflows."""
    x, w, dy = gaussian(1, (60, K)), gaussian(2, (4, K, N)), gaussian(3, (60, N))
    for recipe in ("NVFP4", "BF16"):
        got = results(x, w, jnp.array(given, jnp.int32), dy, RECIPES[recipe])
        same_bytes(got, results(x, w, jnp.array(meant), dy, RECIPES[recipe]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_sizes_of_any_integer_type(dtype: str) -> None:
    """Types that cannot hold the number of rows, and unsigned ones."""
    x, w, dy = gaussian(1, (300, K)), gaussian(2, (3, K, N)), gaussian(3, (300, N))
    sizes = jnp.array([100, 0, 110])
    got = results(x, w, sizes.astype(dtype), dy, RECIPES["MXFP4"])
    same_bytes(got, results(x, w, sizes, dy, RECIPES["MXFP4"]))


def test_vmap_over_some_operands_is_a_loop() -> None:
    """Whatever is shared: matrices, rows, sizes, or nothing; forward and backward."""
    x, w, dy = gaussian(1, (2, 40, K)), gaussian(2, (2, 3, K, N)), gaussian(3, (40, N))
    sizes = jnp.array([[10, 0, 30], [5, 20, 2]])
    for axes in ((0, None, 0), (None, 0, None), (0, 0, 0)):
        x1, w1, sizes1 = (
            v if axis == 0 else v[0] for v, axis in zip((x, w, sizes), axes, strict=True)
        )

        def one(x: Any, w: Any, sizes: Any) -> Any:
            return results(x, w, sizes, dy, RECIPES["NVFP4"])

        def entry(i: int, values: Any = (x1, w1, sizes1), axes: Any = axes) -> Any:
            return one(*(v[i] if a == 0 else v for v, a in zip(values, axes, strict=True)))

        loop = jax.tree.map(lambda *v: jnp.stack(v), *(entry(i) for i in range(2)))
        same_bytes(jax.vmap(one, axes)(x1, w1, sizes1), loop)


def test_a_bad_row_spoils_its_row_only() -> None:
    """NaN in one token: its y is NaN; dw of its group has NaN, other groups are as before."""
    x, w, dy = gaussian(9, (60, K)), gaussian(10, (3, K, N)), gaussian(11, (60, N))
    sizes = jnp.array([20, 20, 20])
    clean = results(x, w, sizes, dy, RECIPES["MXFP4"])
    y, dx, dw = results(x.at[25, 3].set(jnp.nan), w, sizes, dy, RECIPES["MXFP4"])
    assert np.isnan(np.asarray(y[25])).all()
    same_bytes(jnp.delete(y, 25, axis=0), jnp.delete(clean[0], 25, axis=0))
    same_bytes(dx, clean[1])
    same_bytes(dw[jnp.array([0, 2])], clean[2][jnp.array([0, 2])])
    assert np.isnan(np.asarray(dw[1])).any()


@pytest.mark.parametrize(("rows", "groups", "k", "n"), [(0, 3, 8, 4), (5, 0, 8, 4), (5, 2, 0, 4),
                                                        (5, 2, 8, 0), (3, 2, 1, 4)])  # fmt: skip
def test_zero_sizes(rows: int, groups: int, k: int, n: int) -> None:
    """No rows, no groups, no terms, no columns: zeros of lax's shape, with gradients."""
    x, w = jnp.ones((rows, k)), jnp.ones((groups, k, n))
    sizes = jnp.full(groups, 1, jnp.int32)
    y, back = jax.vjp(lambda x, w: fp4.ragged_dot(x, w, sizes), x, w)
    assert y.shape == (rows, n)
    dx, dw = back(jnp.ones_like(y))
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    assert np.isfinite(np.asarray(y)).all()


@pytest.mark.parametrize("lhs", ["float32", "bfloat16", "int32", "float16"])
@pytest.mark.parametrize("rhs", ["float32", "bfloat16"])
@pytest.mark.parametrize("out", [None, "float32", "int32"])
def test_dtypes_are_those_of_lax(lhs: str, rhs: str, out: str | None) -> None:
    """Promotion and preferred_element_type; integer results are left to lax."""
    args = (
        jax.ShapeDtypeStruct((6, 8), jnp.dtype(lhs)),
        jax.ShapeDtypeStruct((2, 8, 3), jnp.dtype(rhs)),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    outcomes = []
    for function in (fp4.ragged_dot, jax.lax.ragged_dot):
        try:
            aval = jax.eval_shape(
                lambda *a, f=function: f(*a, preferred_element_type=out and jnp.dtype(out)), *args
            )
            outcomes.append((aval.shape, aval.dtype, aval.weak_type))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
