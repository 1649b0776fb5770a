"""Numeric bugs planted in the products of `jax_fp4.dot`, for trainings that should notice them.

Each is one that a test of a single product could miss: it leaves shapes, dtypes and most of the
numbers intact. They wrap `product.matrices` or replace the seeds, and work while a step is traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4 import copies, product
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.cli import training

Matrices = Callable[..., list[Any]]


def _is_weight_pair(wanted: Any) -> bool:
    """Whether `matrices` is called for a weight: its copies have two-dimensional scales."""
    return all(operand.scaling == "2d" for operand, _, _ in wanted)


def _is_gradient(wanted: Any) -> bool:
    return any(operand.rounding == "stochastic" for operand, _, _ in wanted)


def swap_nibbles(matrices: Matrices) -> Matrices:
    """dgrad reads the weight with the two codes of every byte exchanged."""

    def planted(x: jax.Array, wanted: Any, *key: Any) -> list[Any]:
        made = matrices(x, wanted, *key)
        if len(wanted) == 2 and _is_weight_pair(wanted):
            q: BlockScaledArray = made[1]
            swapped = q.values << 4 | q.values >> 4
            object.__setattr__(q, "values", swapped)
        return made

    return planted


def rotate_gradient_only(matrices: Matrices) -> Matrices:
    """wgrad multiplies a rotated dy with an x that is not rotated."""

    def planted(x: jax.Array, wanted: Any, *key: Any) -> list[Any]:
        if not _is_gradient(wanted):
            plain = jax_fp4.Operand(jax_fp4.NVFP4)
            wanted = [(plain if o.hadamard else o, axis, stream) for o, axis, stream in wanted]
        return matrices(x, wanted, *key)

    return planted


def drop_tensor_scale(matrices: Matrices) -> Matrices:
    """Gradients have global scale 1, so that their block scales leave the range of E4M3."""
    made_for_scale_1 = np.uint32([[np.float32(6 * 448).view(np.uint32)]])

    def planted(x: jax.Array, wanted: Any, *key: Any) -> list[Any]:
        if not _is_gradient(wanted):
            return matrices(x, wanted, *key)
        measure = copies.amax_for_copies

        def constant(*args: Any, **kwargs: Any) -> Any:
            amax, prints = measure(*args, **kwargs)
            return [jnp.broadcast_to(made_for_scale_1, bits.shape) for bits in amax], prints

        with mock.patch.object(product, "amax_for_copies", constant):
            return matrices(x, wanted, *key)

    return planted


def _rotated_rows(x: jax.Array) -> jax.Array:
    """x [B, R, C] after the Hadamard transform with the default signs of every 16 rows."""
    hadamard = np.ones((1, 1), np.float32)
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    signs = np.float32([-1 if copies.DEFAULT_SIGNS >> i & 1 else 1 for i in range(16)])
    groups = x.reshape(x.shape[0], -1, 16, x.shape[2])
    return jnp.einsum("ij,bgjc->bgic", hadamard * signs / 4, groups).reshape(x.shape)


def truncate_gradients(matrices: Matrices) -> Matrices:
    """Gradients are rounded toward zero instead of stochastically."""

    def truncated(x: jax.Array, q: BlockScaledArray, axis: str) -> BlockScaledArray:
        exact = x.astype(jnp.float32)
        if q.signs is not None:
            exact = _rotated_rows(exact)
        if axis == "rows":
            exact = exact.mT
        above = jnp.abs(copies.decode(q, jnp.dtype(jnp.float32))) > jnp.abs(exact)
        # The next code toward zero is one less: sign and magnitude, the first element lowest.
        down = above[..., 0::2].astype(jnp.uint8) | above[..., 1::2].astype(jnp.uint8) << 4
        return dataclasses.replace(q, values=q.values - down)

    def planted(x: jax.Array, wanted: Any, *key: Any) -> list[Any]:
        if not _is_gradient(wanted):
            return matrices(x, wanted, *key)
        wanted = [(dataclasses.replace(o, rounding="nearest"), *rest) for o, *rest in wanted]
        made = matrices(x, wanted)
        return [truncated(x, q, axis) for q, (_, axis, _) in zip(made, wanted, strict=True)]

    return planted


def freeze_seed(matrices: Matrices) -> Matrices:
    """Stochastic rounding draws the same bits at every step."""

    def constant(prints: jax.Array, shape: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.uint32([1, 2]), (*prints.shape, 2))

    def planted(x: jax.Array, wanted: Any, *key: Any) -> list[Any]:
        with mock.patch.object(product, "_data_seed", constant):
            return matrices(x, wanted, *key)

    return planted


BUGS: dict[str, Callable[[Matrices], Matrices]] = {
    bug.__name__: bug
    for bug in (
        swap_nibbles,
        rotate_gradient_only,
        drop_tensor_scale,
        truncate_gradients,
        freeze_seed,
    )
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is in everything that is traced inside the block.

    Raises:
        AssertionError: nothing was traced, so that nothing was planted.
    """
    calls = 0
    faulty = BUGS[name](product.matrices)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return faulty(*args, **kwargs)

    def forget_traces() -> None:
        jax.clear_caches()
        training._compiled_step.cache_clear()

    forget_traces()
    try:
        with mock.patch.object(product, "matrices", counted):
            yield
        assert calls > 0, f"{name} was not planted: no product was traced"
    finally:
        forget_traces()
