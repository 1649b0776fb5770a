"""dot, matmul and dot_general: signatures of jnp, values and gradients of the recipes.

Contract: shapes and dtypes are those of jnp.dot, jnp.matmul and lax.dot_general; y, dlhs and drhs
lie within the derived bounds of the products of the oracle's quantized matrices, in every
orientation; gradients have the dtype of their primal.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from support.jax_reference import (
    DTYPES,
    dot_reference,
    gaussian,
    require,
    same_bytes,
    widen,
)

RECIPES = list(fp4.RECIPES.values())
Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

# name: (lhs shape, rhs shape, dimension numbers)
SIGNATURES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Dims]] = {
    "NN": ((37, 50), (50, 21), (((1,), (0,)), ((), ()))),
    "NT": ((37, 50), (21, 50), (((1,), (1,)), ((), ()))),
    "TN": ((50, 37), (50, 21), (((0,), (0,)), ((), ()))),
    "TT": ((50, 37), (21, 50), (((0,), (1,)), ((), ()))),
    "tokens": ((2, 3, 7, 40), (40, 4, 6), (((3,), (0,)), ((), ()))),
    "batch": ((3, 9, 33), (3, 33, 10), (((2,), (1,)), ((0,), (0,)))),
    "batch anywhere": ((9, 2, 33, 3), (33, 10, 3, 2), (((2,), (0,)), ((1, 3), (3, 2)))),
    "two contracted": ((9, 4, 5, 6), (4, 6, 10), (((1, 3), (0, 1)), ((), ()))),
    "contracted in another order": ((4, 9, 6), (6, 4, 10), (((2, 0), (0, 1)), ((), ()))),
    "contracted first, many free": ((40, 3, 5), (40, 2, 7), (((0,), (0,)), ((), ()))),
    "batch and two contracted": ((2, 4, 5, 9), (2, 4, 5, 8), (((1, 2), (1, 2)), ((0,), (0,)))),
    "vectors": ((50,), (50,), (((0,), (0,)), ((), ()))),
}


def canonical(x: Any, batch: Any, contract: Any) -> np.ndarray:
    """x as [B, free, K], contracted dimensions in the order given."""
    x = np.asarray(x)
    free = [i for i in range(x.ndim) if i not in batch and i not in contract]
    sizes = [int(np.prod([x.shape[i] for i in group])) for group in (batch, free, contract)]
    return np.ascontiguousarray(x.transpose(*batch, *free, *contract)).reshape(sizes)


def check(
    lhs: jax.Array, rhs: jax.Array, dims: Dims, recipe: fp4.Recipe, out: str | None = None
) -> None:
    """y, dlhs and drhs of one dot_general against the oracle's products."""

    def run(lhs: Any, rhs: Any, dy: Any) -> Any:
        y, back = jax.vjp(
            lambda a, b: fp4.dot_general(
                a, b, dims, preferred_element_type=out and jnp.dtype(out), recipe=recipe
            ),
            lhs,
            rhs,
        )
        return y, *back(dy)

    reference = jax.eval_shape(
        lambda a, b: jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32), lhs, rhs
    )
    out = out or jnp.promote_types(lhs.dtype, rhs.dtype).name
    (lc, rc), (lb, rb) = dims
    order = np.argsort(lc)
    lc, rc = [lc[i] for i in order], [rc[i] for i in order]
    a, b = canonical(lhs, lb, lc), canonical(rhs, rb, rc)
    dy = gaussian(99, reference.shape, out)
    y, dlhs, drhs = jax.jit(run)(lhs, rhs, dy)
    assert (y.shape, y.dtype.name) == (reference.shape, out)
    assert (dlhs.shape, dlhs.dtype) == (lhs.shape, lhs.dtype)
    assert (drhs.shape, drhs.dtype) == (rhs.shape, rhs.dtype)
    shape = (a.shape[0], a.shape[1], b.shape[1])
    wanted = dot_reference(a, b, np.asarray(dy).reshape(shape), recipe, has_batch=bool(lb))
    require(wanted.y, np.asarray(y).reshape(shape))
    require(wanted.dlhs, canonical(dlhs, lb, lc))
    require(wanted.drhs, canonical(drhs, rb, rc))
    for result in (y, dlhs, drhs):
        assert (widen(result) != 0).mean() > 0.5


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("recipe", [fp4.recipes.NVFP4, fp4.recipes.MXFP8], ids=lambda r: r.name)
def test_values_and_gradients_in_every_signature(name: str, recipe: fp4.Recipe) -> None:
    """Both orientations of both operands, batch dimensions anywhere, several contracted ones."""
    left, right, dims = SIGNATURES[name]
    check(gaussian(1, left), gaussian(2, right), dims, recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("name", ["NN", "batch"])
def test_values_and_gradients_of_every_recipe(name: str, recipe: fp4.Recipe) -> None:
    """All formats, scalings and roundings of the named recipes, from bf16 activations."""
    left, right, dims = SIGNATURES[name]
    check(gaussian(3, left, "bfloat16"), gaussian(4, right), dims, recipe)


SCALED = fp4.Operand(fp4.NVFP4, four_over_six=True, scaling="2d")
OWN = {
    "weight on the left": dataclasses.replace(fp4.recipes.NVFP4, weight="lhs"),
    "weight on the right": dataclasses.replace(fp4.recipes.NVFP4, weight="rhs"),
    "own signs": dataclasses.replace(
        fp4.recipes.NVFP4,
        wgrad_dy=fp4.Operand(fp4.NVFP4, rounding="stochastic", hadamard=(1, -1, -1, 1) * 4),
        wgrad_x=fp4.Operand(fp4.NVFP4, hadamard=(1, -1, -1, 1) * 4),
    ),
    "four over six": dataclasses.replace(fp4.recipes.NVFP4, fprop_x=SCALED, fprop_w=SCALED),
    "floor rule, mixed elements": fp4.Recipe(
        "mixed",
        fp4.Operand(fp4.MXFP4, scale_rule="floor"),
        fp4.Operand(fp4.MXFP8_E4M3, scaling="2d"),
        fp4.Operand(fp4.MXFP6_E3M2, rounding="stochastic"),
        fp4.Operand(fp4.MXFP4, hadamard=False),
        fp4.Operand(fp4.MXFP8_E5M2, rounding="stochastic", hadamard=True),
        fp4.Operand(fp4.MXFP6_E2M3, hadamard=True),
    ),
    "forward only": fp4.Recipe("fwd", fp4.Operand(fp4.NVFP4), fp4.Operand(fp4.NVFP4)),
    "wgrad only": fp4.Recipe(
        "wgrad", wgrad_dy=fp4.Operand(fp4.NVFP4), wgrad_x=fp4.Operand(fp4.NVFP4)
    ),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("signature", ["NT", "batch"])
def test_values_and_gradients_of_own_recipes(name: str, signature: str) -> None:
    """Every choice that a recipe offers, also where a product stays in bfloat16."""
    left, right, dims = SIGNATURES[signature]
    check(gaussian(5, left), gaussian(6, right, "bfloat16"), dims, OWN[name])


@pytest.mark.parametrize("tokens", [1, 7, 100, 1000])
@pytest.mark.parametrize("recipe", [fp4.recipes.NVFP4, fp4.recipes.MXFP4], ids=lambda r: r.name)
def test_ragged_token_counts(tokens: int, recipe: fp4.Recipe) -> None:
    """wgrad contracts the tokens: counts that no block divides, in forward and backward."""
    x, w = gaussian(7, (tokens, 48), "bfloat16"), gaussian(8, (48, 24))
    check(x, w, SIGNATURES["NN"][2], recipe)


@pytest.mark.parametrize(("lhs", "rhs"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("out", [None, "float32"])
def test_cotangents_have_the_dtype_of_their_primal(lhs: str, rhs: str, out: str | None) -> None:
    """All mixes of float32, bfloat16 and float16; dw in float32 is not rounded to bfloat16."""
    if out is not None and "float32" in (lhs, rhs):
        out = "bfloat16"
    check(gaussian(9, (20, 33), lhs), gaussian(10, (33, 18), rhs), SIGNATURES["NN"][2],
          fp4.recipes.NVFP4_RN, out)  # fmt: skip


def test_a_float32_weight_gradient_keeps_float32_precision() -> None:
    """x in bf16, w in f32, exactly representable values: dw is exact, and no bf16 numbers."""
    rng = np.random.default_rng(0)
    x = rng.choice([-6.0, -1.0, 0.5, 6.0], (1000, 16)).astype(np.float32)
    dy = rng.choice([-6.0, -1.5, 1.0, 6.0], (1000, 16)).astype(np.float32)
    x[::16], dy[::16] = 6.0, 6.0  # every block along the tokens has the scale of 6
    xb = jnp.asarray(x).astype(jnp.bfloat16)
    _, back = jax.vjp(
        lambda w: fp4.dot(xb, w, preferred_element_type=jnp.float32, recipe=fp4.recipes.NVFP4_RN),
        jnp.ones((16, 16)),
    )
    (dw,) = back(jnp.asarray(dy))
    exact = x.astype(np.float64).T @ dy
    assert dw.dtype == jnp.float32
    assert np.abs(np.asarray(dw) - exact).max() < 1e-6 * np.abs(exact).max()
    assert (widen(dw.astype(jnp.bfloat16)) != np.asarray(dw)).any()


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 4), (4, 0, 3), (3, 16, 0), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_zero_sizes(m: int, k: int, n: int, recipe: fp4.Recipe) -> None:
    """No tokens, no features: zeros of the right shape, forward and backward."""
    x, w = jnp.ones((m, k)), jnp.ones((k, n))
    y, back = jax.vjp(lambda a, b: fp4.dot(a, b, recipe=recipe), x, w)
    dx, dw = back(jnp.ones_like(y))
    assert (y.shape, dx.shape, dw.shape) == ((m, n), (m, k), (k, n))
    expected = 1.0 if (m, k, n) == (1, 1, 1) else 0.0
    for result in (y, dx, dw):
        np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-6)


# ---- Signatures of jnp ---------------------------------------------------------------------------


def outcome(function: Any, *args: Any, **keywords: Any) -> Any:
    """(shape, dtype, weak type) of a call, or "error"."""
    try:
        aval = jax.eval_shape(lambda *a: function(*a, **keywords), *args)
    except (TypeError, ValueError):
        return "error"
    return aval.shape, aval.dtype, aval.weak_type


def random_operand(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(rng.choice(DTYPES)))


@pytest.mark.parametrize("seed", range(4))
def test_dot_and_matmul_have_the_shapes_of_jnp(seed: int) -> None:
    """Ranks 0 to 5, sizes that broadcast or do not: the same shape and dtype, or an error."""
    rng = np.random.default_rng(seed)
    errors = 0
    for _ in range(60):
        k = int(rng.choice([1, 2, 3]))
        left = tuple(int(v) for v in rng.choice([1, 2, 3], rng.integers(0, 6)))
        right = tuple(int(v) for v in rng.choice([1, 2, 3], rng.integers(0, 6)))
        if left and right and rng.random() < 0.8:  # most of them contract
            left = (*left[:-1], k)
            right = (*right[:-2], k, *right[-1:]) if len(right) > 1 else (k,)
        a, b = random_operand(rng, left), random_operand(rng, right)
        keywords = {} if rng.random() < 0.7 else {"preferred_element_type": jnp.float32}
        for ours, theirs in ((fp4.dot, jnp.dot), (fp4.matmul, jnp.matmul)):
            wanted = outcome(theirs, a, b, **keywords)
            assert outcome(ours, a, b, **keywords) == wanted, (ours.__name__, a, b)
            errors += wanted == "error"
    assert 0 < errors < 100


@pytest.mark.parametrize("seed", range(4))
def test_dot_general_has_the_shapes_of_lax(seed: int) -> None:
    """Random ranks, batch and contracting dimensions in any place and order."""
    rng = np.random.default_rng(100 + seed)
    for _ in range(60):
        names = {"batch": rng.integers(0, 3), "k": rng.integers(0, 3)}
        sizes = {
            (kind, i): int(rng.choice([1, 2, 3])) for kind, n in names.items() for i in range(n)
        }
        sides = []
        for side in "lr":
            own = {(side, i): int(rng.choice([1, 2, 3])) for i in range(rng.integers(0, 3))}
            order = list({**sizes, **own})
            rng.shuffle(order)
            order = [tuple(name) for name in order]
            sides.append((order, tuple(int({**sizes, **own}[(n[0], int(n[1]))]) for n in order)))
        keys = [[(str(kind), int(i)) for kind, i in order] for order, _ in sides]
        dims = tuple(
            tuple(tuple(key.index((kind, i)) for i in range(names[kind])) for key in keys)
            for kind in ("k", "batch")
        )
        dtype = jnp.dtype(rng.choice(DTYPES))
        a, b = (jax.ShapeDtypeStruct(shape, dtype) for _, shape in sides)
        wanted = outcome(lambda a, b, d=dims: jax.lax.dot_general(a, b, d), a, b)
        assert outcome(lambda a, b, d=dims: fp4.dot_general(a, b, d), a, b) == wanted, (a, b, dims)


def test_types_promote_as_in_jnp() -> None:
    """Weakly typed operands and Python scalars do not widen the other one."""
    x = jnp.ones((3, 16), jnp.bfloat16)
    for ours, theirs in ((fp4.dot, jnp.dot), (fp4.matmul, jnp.matmul)):
        wanted = theirs(x, jnp.full((16, 2), 2.0))
        assert ours(x, jnp.full((16, 2), 2.0)).dtype == wanted.dtype == jnp.bfloat16
        assert ours(x, jnp.full((16, 2), 2.0, jnp.float32)).dtype == jnp.float32
    for scalar in (2.0, 2):
        got, wanted = fp4.dot(scalar, x), jnp.dot(scalar, x)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        same_bytes(got, wanted)


MATMULS = [
    ((5, 40), (40,)),
    ((40,), (40, 6)),
    ((2, 1, 5, 40), (3, 40, 6)),
    ((3, 5, 40), (1, 40, 6)),
    ((40,), (3, 40, 6)),
]


@pytest.mark.parametrize(("a", "b"), MATMULS, ids=str)
def test_matmul_equals_the_dot_general_that_it_stands_for(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    """Leading dimensions that one operand lacks are rows of one matrix, with one amax."""
    x, w = gaussian(21, a), gaussian(22, b)
    got = fp4.matmul(x, w)
    assert got.shape == np.matmul(np.ones(a), np.ones(b)).shape
    exact = np.matmul(widen(x).astype(np.float64), widen(w))
    error = np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact)
    assert 0.01 < error < 0.3
    lead_b = len(b) - 2 if len(b) > 1 else 0
    wanted = fp4.dot_general(
        x.reshape(-1, 40), w, (((1,), (lead_b if len(b) > 1 else 0,)), ((), ()))
    )  # [rows, lead_b..., N]
    lead = a[:-1]
    wanted = np.asarray(wanted).reshape(*lead, *b[: len(b) - 2], *b[len(b) - 1 :][: len(b) > 1])
    if (a, b) == ((2, 1, 5, 40), (3, 40, 6)):
        wanted = wanted[:, 0].transpose(0, 2, 1, 3)
    elif (a, b) == ((3, 5, 40), (1, 40, 6)):
        wanted = wanted[:, :, 0]
    same_bytes(got, wanted)


def test_batched_matmul_is_a_dot_for_each_element() -> None:
    """Common leading dimensions have an amax each: without stochastic rounding, a loop of dots."""
    x, w = gaussian(23, (2, 3, 5, 40)), gaussian(24, (2, 3, 40, 6))
    whole = fp4.matmul(x, w, recipe=fp4.recipes.NVFP4_RN)
    for i, j in itertools.product(range(2), range(3)):
        same_bytes(whole[i, j], fp4.dot(x[i, j], w[i, j], recipe=fp4.recipes.NVFP4_RN))


def test_precision_is_accepted() -> None:
    """Every way jnp takes a precision, without effect on the bytes."""
    x, w = gaussian(25, (4, 32)), gaussian(26, (32, 4))
    wanted = fp4.dot(x, w)
    highest = jax.lax.Precision.HIGHEST
    for precision in (None, "highest", "float32", highest, (highest, jax.lax.Precision.DEFAULT)):
        same_bytes(fp4.dot(x, w, precision=precision), wanted)


# ---- What cannot be differentiated ---------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_second_derivatives_are_refused_or_right(recipe: fp4.Recipe) -> None:
    """A TypeError that names the way out; the BF16 recipe, which has no codes, works."""
    x, w = gaussian(27, (4, 32)), gaussian(28, (32, 4))

    def inner(x: Any) -> Any:
        return jax.grad(lambda v: (fp4.dot(v, w, recipe=recipe) ** 2).sum())(x).sum()

    if recipe.quantized:
        with pytest.raises(
            TypeError, match=r"cannot be differentiated.*(stop_gradient|jax_fp4\.dot)"
        ):
            jax.grad(inner)(x)
        with pytest.raises(TypeError, match="cannot be differentiated"):
            jax.hessian(lambda v: fp4.dot(v, w, recipe=recipe).sum())(x)
    else:
        exact = 2 * widen(w).astype(np.float64).sum(0) @ widen(w).astype(np.float64).T
        got = np.asarray(jax.grad(inner)(x))
        np.testing.assert_allclose(got, np.broadcast_to(exact, got.shape), rtol=0.1, atol=1.0)
    with pytest.raises(TypeError, match=r"forward-mode|jvp"):
        jax.jvp(lambda v: fp4.dot(v, w, recipe=recipe), (x,), (x,))


def test_the_result_is_not_that_of_a_wider_product() -> None:
    """No silent fallback: quantized products differ from bfloat16's, for every quantized recipe."""
    x, w = gaussian(29, (16, 64)), gaussian(30, (64, 16))
    plain = np.asarray(fp4.dot(x, w, recipe=fp4.recipes.BF16))
    for recipe in RECIPES:
        if recipe.quantized:
            assert (np.asarray(fp4.dot(x, w, recipe=recipe)) != plain).mean() > 0.9
