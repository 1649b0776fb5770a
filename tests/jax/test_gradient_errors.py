"""The error that NVFP4 training makes in y, dx and dw is that of an independent implementation.

Inputs: M, K, N = 1024, 512, 768; gaussian x and w; gaussian dy whose rows have log-normal scales,
as gradients of different tokens have. The exact products are float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4
from jax_fp4 import Operand, Recipe, recipes
from oracles import training
from oracles.training import Products, relative_error

M, K, N = 1024, 512, 768
SEED = (123, 456)


@pytest.fixture(scope="module")
def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [M, K], w [K, N], dy [M, N], float32."""
    random = np.random.default_rng(7)
    x, w = random.normal(size=(M, K)), random.normal(size=(K, N))
    dy = random.normal(size=(M, N)) * random.lognormal(size=(M, 1))
    return x.astype(np.float32), w.astype(np.float32), dy.astype(np.float32)


@pytest.fixture(scope="module")
def exact(inputs: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Products:
    x, w, dy = (value.astype(np.float64) for value in inputs)
    return Products(x @ w, dy @ w.T, x.T @ dy)


def ours(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray], recipe: Recipe, key: jax.Array | None
) -> Products:
    x, w, dy = (jnp.asarray(value) for value in inputs)

    @jax.jit
    def products(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, backward = jax.vjp(lambda x, w: jax_fp4.dot(x, w, recipe=recipe, key=key), x, w)
        return y, *backward(dy)

    return Products(*(np.asarray(value, np.float64) for value in products(x, w, dy)))


def errors(got: Products, exact: Products) -> np.ndarray:
    """Relative Frobenius errors of y, dx, dw."""
    return np.array([relative_error(getattr(got, p), getattr(exact, p)) for p in ("y", "dx", "dw")])


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        (recipes.NVFP4, {}, (0.146, 0.175, 0.175)),
        (
            recipes.NVFP4_RN,
            {"stochastic": False, "hadamard": False, "weight_scaling": "1d"},
            (0.135, 0.134, 0.129),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_errors_equal_the_oracles(
    recipe: Recipe,
    options: dict[str, object],
    expected: tuple[float, float, float],
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    exact: Products,
) -> None:
    """With the oracle's seed: the same codes, so the same products up to the order of f32 sums."""
    oracle = training.nvfp4_products(*inputs, dgrad_seed=SEED, wgrad_seed=SEED, **options)  # type: ignore[arg-type]
    got = ours(inputs, recipe, jnp.array(SEED, jnp.uint32))
    # A sum of at most 1024 products in f32 errs by 2^-24 a step, and its terms partly cancel.
    for name in ("y", "dx", "dw"):
        assert relative_error(getattr(got, name), getattr(oracle, name)) < 1e-5
    found = errors(got, exact)
    np.testing.assert_allclose(found, errors(oracle, exact), rtol=1e-3)
    np.testing.assert_allclose(found, expected, rtol=0.03)


def test_errors_are_the_same_with_a_seed_from_the_data(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray], exact: Products
) -> None:
    """Without a key the random bits are others, and just as good."""
    with_key = ours(inputs, recipes.NVFP4, jnp.array(SEED, jnp.uint32))
    without = ours(inputs, recipes.NVFP4, None)
    assert not np.array_equal(with_key.dx, without.dx)
    np.testing.assert_allclose(errors(without, exact), errors(with_key, exact), rtol=0.01)


@pytest.mark.parametrize("product", ["dx", "dw"])
def test_a_wrong_recipe_is_noticed(
    product: str, inputs: tuple[np.ndarray, np.ndarray, np.ndarray], exact: Products
) -> None:
    """Gradients rounded to nearest instead of stochastically differ by more than the tolerance."""
    nearest = Operand(jax_fp4.NVFP4)
    planted = Recipe("planted", *[nearest] * 6)
    oracle = training.nvfp4_products(*inputs, dgrad_seed=SEED, wgrad_seed=SEED)
    index = ("y", "dx", "dw").index(product)
    found = errors(ours(inputs, planted, None), exact)[index]
    assert abs(found / errors(oracle, exact)[index] - 1) > 0.01
