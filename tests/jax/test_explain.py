"""explain: every product of a function, how it runs, and why; nothing is run.

Contract: one line for each product in the program, also for those that transformations add; what is
not quantized is listed with its reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_fp4 as fp4
from support.jax_reference import gaussian

X, W = gaussian(1, (19, 48), "bfloat16"), gaussian(2, (48, 33))


def lines(function: Any, *args: Any) -> list[tuple[Any, ...]]:
    return [(p.function, p.role, p.path, p.why) for p in fp4.explain(function)(*args)]


def loss(x: Any, w: Any) -> Any:
    return (fp4.dot(x, w) ** 2).sum()


def test_the_three_products_of_a_layer() -> None:
    """Roles, formats, shapes, padding, bytes and recipe of forward and backward pass."""
    found = fp4.explain(jax.grad(loss, (0, 1)))(X, W)
    fprop, dgrad, wgrad = found
    assert [p.role for p in found] == ["fprop", "dgrad", "wgrad"]
    assert all((p.function, p.path, p.why) == ("dot", "quantized", "recipe NVFP4") for p in found)
    assert (fprop.shape, fprop.padded) == ((1, 19, 33, 48), (128, 128, 64))
    assert dgrad.shape == (1, 19, 48, 33)
    assert wgrad.shape == (1, 48, 33, 32)  # 19 tokens, whole groups of the Hadamard transform
    assert (fprop.left, fprop.right, fprop.result) == ("NVFP4", "NVFP4", "float32")
    # codes 32 bytes a row, scales 128 x 4 a tile, a global scale each, and the result
    assert fprop.nbytes == (19 + 33) * 32 + 2 * 512 + 2 * 4 + 19 * 33 * 4
    assert dgrad.result == "bfloat16" and wgrad.result == "float32"


def test_formats_are_those_of_the_recipe() -> None:
    """Mixed formats; a product that the recipe leaves in bfloat16 says so."""
    mixed = fp4.Recipe("half / mixed", fp4.Operand(fp4.MXFP4), fp4.Operand(fp4.MXFP8_E4M3))
    with fp4.use_recipe(mixed):
        fprop, dgrad, wgrad = fp4.explain(jax.grad(loss, (0, 1)))(X, W)
    assert (fprop.left, fprop.right) == ("MXFP4", "MXFP8_E4M3")
    assert fprop.why == "recipe half___mixed"
    for p in (dgrad, wgrad):
        assert (p.path, p.left, p.right) == ("bfloat16", "bfloat16", "bfloat16")
    assert (dgrad.role, wgrad.role) == ("dgrad", "wgrad")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda: fp4.dot(jnp.ones((3, 4), int), jnp.ones((4, 2), int)), "integers"),
        (lambda: fp4.matmul(jnp.ones((3, 4), jnp.complex64), jnp.ones((4, 2))), "complex64"),
        (lambda: fp4.dot(X, W, preferred_element_type=jnp.int32), "int32"),
        (lambda: fp4.einsum("i,j->ij", W[0], W[1]), "sum of 1"),
        (lambda: fp4.dot(W[:, :0], W[:0]), "sum of 0"),
        (lambda: fp4.dot(2.0, W), "scalar"),
        (lambda: fp4.inner(W, 3.0), "scalar"),
        (lambda: fp4.ragged_dot(jnp.ones((3, 4), int), jnp.ones((2, 4, 2), int),
                                jnp.array([1, 2])), "integers"),
    ],
)  # fmt: skip
def test_what_is_left_to_jax_is_listed_with_the_reason(function: Any, why: str) -> None:
    """The policy's word for each of its rows."""
    (product,) = fp4.explain(function)()
    assert (product.path, product.why, product.role) == ("jax", why, "")


def test_gradients_of_what_is_left_to_jax_are_listed() -> None:
    """An outer product has two gradients, which are sums and jax's as well."""
    found = lines(
        jax.grad(lambda a, b: (fp4.einsum("i,j->ij", a, b) ** 2).sum(), (0, 1)), W[0], W[1]
    )
    assert found == [("einsum", "", "jax", "sum of 1")] * 3


def test_products_are_found_under_every_transformation() -> None:
    """jit that was traced before, scan, while, cond, vmap, remat: nothing is lost."""
    traced = jax.jit(jax.grad(loss))
    traced(X, W)
    roles = [p.role for p in fp4.explain(traced)(X, W)]
    assert roles.count("fprop") == roles.count("dgrad") == 1
    (vmapped,) = fp4.explain(jax.vmap(fp4.dot, (0, None)))(jnp.stack([X] * 5), W)
    assert vmapped.shape == (5, 19, 33, 48)
    ws = jnp.ones((4, 48, 48))

    def scanned(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (fp4.dot(h, w), None), x, ws)[0].sum()

    found = fp4.explain(jax.grad(scanned, (0, 1)))(X.astype(jnp.float32), ws)
    assert [(p.role, p.times) for p in found] == [("fprop", 4), ("dgrad", 4), ("wgrad", 4)]
    looped = fp4.explain(
        lambda x: jax.lax.while_loop(lambda h: h.sum() < 0, lambda h: fp4.dot(h, ws[0]), x)
    )(X.astype(jnp.float32))
    assert [p.times for p in looped] == [None]
    both = fp4.explain(
        lambda p: jax.lax.cond(p, lambda: fp4.dot(X, W), lambda: fp4.dot(X[:7], W)[:1] * X[:, :1])
    )(True)
    assert sorted(p.shape[1] for p in both) == [7, 19]
    remat = lines(jax.grad(jax.checkpoint(loss), (0, 1)), X, W)
    assert {role for _, role, _, _ in remat} == {"fprop", "dgrad", "wgrad"}


def test_ragged_products_and_quantized_operands() -> None:
    """ragged_dot is a call for each of its products, padded; scaled_matmul has no role."""
    ragged = fp4.explain(
        jax.grad(lambda x, w: fp4.ragged_dot(x, w, jnp.array([3, 16])).sum(), (0, 1))
    )(X, jnp.ones((2, 48, 33)))
    assert [(p.role, p.times, p.shape) for p in ragged] == [
        ("fprop", 1, (2, 256, 33, 48)), ("dgrad", 1, (2, 256, 48, 33)),
        ("wgrad", 1, (2, 48, 33, 256))]  # fmt: skip
    q = fp4.quantize(X)
    (product,) = fp4.explain(fp4.scaled_matmul)(q, q)
    assert dataclasses.astuple(product)[:4] == (
        "scaled_matmul", "", "quantized", "quantized operands")  # fmt: skip
    assert product.padded == (19, 19, 64)  # linear scales are not padded


def test_it_prints_a_table_and_runs_nothing() -> None:
    """Shapes are enough; products of others are not listed."""
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (X, W)]
    found = fp4.explain(lambda x, w: fp4.dot(x, w) + jnp.dot(x, w))(*shapes)
    assert len(found) == 1
    head, line = str(found).splitlines()
    assert head.split()[:4] == ["function", "role", "path", "why"]
    assert line.split()[:5] == ["dot", "fprop", "quantized", "recipe", "NVFP4"]
    assert "1 x 19 x 33 x 48" in line and "NVFP4, NVFP4" in line
    assert str(fp4.explain(jnp.dot)(*shapes)).count("\n") == 0
