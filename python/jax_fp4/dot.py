"""dot, matmul, dot_general, tensordot, inner, vdot, vecdot, matvec, vecmat: jax's, quantized.

They only name dimensions; contraction.py does the rest. `einsum` and `ragged_dot` have files of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import sharding
from jax_fp4.contraction import Labels, Operand, binary
from jax_fp4.recipe import Recipe


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` with quantized operands and quantized gradients.

    Args:
        lhs: float32, bfloat16 or float16; others are left to jax (docs/dot_family.md).
        rhs: like lhs, or what `quantize_weight` returned.
        dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as in lax.
            Batch dimensions have an amax each; the others are flattened to one matrix with one.
        precision: accepted, without effect on quantized products; an explicit algorithm is refused.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        out_sharding: how the result is sharded, on explicit meshes.
        recipe: how operands and gradients are quantized; by default that of `use_recipe`, or else
            ``recipes.NVFP4``.
        key: a jax.random key for stochastic rounding in the backward pass. Without one the seed is
            made from the bits of the cotangent: reproducible, and different at every step.

    Returns:
        Batch dimensions, then free dimensions of lhs, then of rhs; dtype and weak type are lax's.

    Raises:
        Exception: what lax raises for these arguments, of the same type; TypeError where the second
            derivative is asked for.
    """

    def names(lhs: Operand, rhs: Operand) -> tuple[Labels, Labels, Labels]:
        (lc, rc), (lb, rb) = _pairs(dimension_numbers, lhs)
        sides: list[list[Any]] = []
        for x, batch, contracted, side in ((lhs, lb, lc, "l"), (rhs, rb, rc, "r")):
            own: list[Any] = [(side, i) for i in range(x.ndim)]
            for kind, dims in (("batch", batch), ("contracted", contracted)):
                for number, i in enumerate(dims):
                    own[i] = (kind, number)
            sides.append(own)
        batch = [("batch", i) for i in range(len(lb))]
        free = [
            name for own, side in zip(sides, "lr", strict=True) for name in own if name[0] == side
        ]
        return sides[0], sides[1], [*batch, *free]

    keywords = {
        "dimension_numbers": dimension_numbers,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    operands = (("lhs", lhs), ("rhs", rhs))
    return binary(jax.lax.dot_general, operands, names, keywords, recipe, key)


def dot(
    a: Any,
    b: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.dot` with quantized operands and quantized gradients.

    The last axis of ``a`` is contracted with the last but one of ``b`` (its only one, if it is a
    vector); a scalar multiplies. ``a``'s other dimensions are flattened to one matrix.

    Args:
        a: float32, bfloat16 or float16, of any rank; others are left to jax (docs/dot_family.md).
        b: like a, or what `quantize_weight` returned.
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        out_sharding: see `dot_general`.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        An array of shape ``a.shape[:-1] + b.shape[:-2] + b.shape[-1:]``.

    Raises:
        Exception: what jnp.dot raises for these arguments, of the same type.
    """

    def names(a: Operand, b: Operand) -> tuple[Labels, Labels, Labels]:
        left = [*_own("a", a.ndim - 1), "k"]
        right = [*_own("b", b.ndim - 1)]
        right.insert(max(b.ndim - 2, 0), "k")
        return left, right, [name for name in [*left, *right] if name != "k"]

    keywords = _keywords(precision, preferred_element_type, out_sharding=out_sharding)
    return binary(jnp.dot, (("a", a), ("b", b)), names, keywords, recipe, key)


def matmul(
    a: Any,
    b: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.matmul` with quantized operands and quantized gradients.

    Args:
        a: float32, bfloat16 or float16 [..., M, K] or [K]; others are left to jax.
        b: [..., K, N] or [K], or what `quantize_weight` returned.
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        out_sharding: see `dot_general`.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        [..., M, N], leading dimensions broadcast; those that only one operand has, or that are 1 in
        the other one, are no batch dimensions but rows of one matrix.

    Raises:
        Exception: what jnp.matmul raises for these arguments, of the same type.
    """
    keywords = _keywords(precision, preferred_element_type, out_sharding=out_sharding)
    names = _broadcasting(("m", "k"), ("k", "n"))
    return binary(jnp.matmul, (("a", a), ("b", b)), names, keywords, recipe, key)


def matvec(
    x1: Any, x2: Any, /, *, recipe: Recipe | None = None, key: jax.Array | None = None
) -> jax.Array:
    """`jax.numpy.matvec` with quantized operands and quantized gradients.

    Args:
        x1: [..., M, K], matrices.
        x2: [..., K], vectors.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        [..., M], leading dimensions broadcast as in `matmul`.

    Raises:
        Exception: what jnp.matvec raises for these arguments, of the same type.
    """
    names = _broadcasting(("m", "k"), ("k",))
    return binary(jnp.matvec, (("x1", x1), ("x2", x2)), names, {}, recipe, key)


def vecmat(
    x1: Any, x2: Any, /, *, recipe: Recipe | None = None, key: jax.Array | None = None
) -> jax.Array:
    """`jax.numpy.vecmat` with quantized operands and quantized gradients.

    Args:
        x1: [..., K], vectors.
        x2: [..., K, N], matrices.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        [..., N], leading dimensions broadcast as in `matmul`.

    Raises:
        Exception: what jnp.vecmat raises for these arguments, of the same type.
    """
    names = _broadcasting(("k",), ("k", "n"))
    return binary(jnp.vecmat, (("x1", x1), ("x2", x2)), names, {}, recipe, key)


def vecdot(
    x1: Any,
    x2: Any,
    /,
    *,
    axis: int = -1,
    precision: Any = None,
    preferred_element_type: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.vecdot` with quantized operands and quantized gradients.

    Args:
        x1: [..., K, ...], vectors along ``axis``.
        x2: [..., K, ...], vectors along ``axis``.
        axis: the axis of each operand that is contracted.
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        The other dimensions, broadcast; those that both operands have are batch dimensions.

    Raises:
        Exception: what jnp.vecdot raises for these arguments, of the same type.
    """

    def names(x1: Operand, x2: Operand) -> tuple[Labels, Labels, Labels]:
        sides = []
        for x in (x1, x2):
            own: list[Any] = _lead(x.ndim - 1)
            own.insert(axis % x.ndim, "k")
            sides.append(own)
        return sides[0], sides[1], _lead(max(x1.ndim, x2.ndim) - 1)

    keywords = _keywords(precision, preferred_element_type, axis=axis)
    return binary(jnp.vecdot, (("x1", x1), ("x2", x2)), names, keywords, recipe, key)


def vdot(
    a: Any,
    b: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.vdot` with quantized operands and quantized gradients.

    Args:
        a: of any shape, taken as a vector.
        b: of the same size, taken as a vector.
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        A scalar.

    Raises:
        Exception: what jnp.vdot raises for these arguments, of the same type.
    """
    keywords = _keywords(precision, preferred_element_type)
    return binary(
        jnp.vdot, (("a", a), ("b", b)), lambda a, b: (("k",), ("k",), ()), keywords, recipe, key,
        reshape=lambda x: sharding.reshape(x, (math.prod(x.shape),)),
    )  # fmt: skip


def inner(
    a: Any,
    b: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.inner` with quantized operands and quantized gradients.

    Args:
        a: [..., K].
        b: [..., K], or what ``quantize_weight(w, axis=-1)`` returned.
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        The dimensions of a, then those of b, but for the last ones; a scalar operand multiplies.

    Raises:
        Exception: what jnp.inner raises for these arguments, of the same type.
    """

    def names(a: Operand, b: Operand) -> tuple[Labels, Labels, Labels]:
        left, right = _own("a", a.ndim - 1), _own("b", b.ndim - 1)
        return [*left, "k"], [*right, "k"], [*left, *right]

    keywords = _keywords(precision, preferred_element_type)
    return binary(jnp.inner, (("a", a), ("b", b)), names, keywords, recipe, key)


def tensordot(
    a: Any,
    b: Any,
    axes: int | Sequence[int] | Sequence[Sequence[int]] = 2,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.tensordot` with quantized operands and quantized gradients.

    Args:
        a: of any rank.
        b: of any rank, or what `quantize_weight` returned.
        axes: the last ``axes`` of a with the first ones of b; or (axes of a, axes of b).
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        out_sharding: see `dot_general`.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        The other dimensions of a, then those of b.

    Raises:
        Exception: what jnp.tensordot raises for these arguments, of the same type.
    """

    def names(a: Operand, b: Operand) -> tuple[Labels, Labels, Labels]:
        if isinstance(axes, int):
            pair: Any = (range(a.ndim - axes, a.ndim), range(axes))
        else:
            pair = tuple((group,) if isinstance(group, int) else group for group in axes)
        left, right = _own("a", a.ndim), _own("b", b.ndim)
        for number, (i, j) in enumerate(zip(*pair, strict=True)):
            left[i % a.ndim] = right[j % b.ndim] = ("k", number)
        return left, right, [name for name in [*left, *right] if name[0] != "k"]

    keywords = _keywords(precision, preferred_element_type, out_sharding=out_sharding, axes=axes)
    return binary(jnp.tensordot, (("a", a), ("b", b)), names, keywords, recipe, key)


# ---- Names of dimensions -------------------------------------------------------------------------


def _pairs(numbers: Any, lhs: Operand) -> list[list[tuple[int, ...]]]:
    """Dimension numbers as lax reads them: an int for one dimension, None for a plain product."""
    if numbers is None:
        return [[(lhs.ndim - 1,), (0,)], [(), ()]]
    return [
        [(side,) if isinstance(side, int) else tuple(side) for side in pair] for pair in numbers
    ]


def _keywords(precision: Any, preferred_element_type: Any, **more: Any) -> dict[str, Any]:
    return {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        **more,
    }


def _own(side: str, count: int) -> list[Any]:
    """Names that the other operand does not have."""
    return [(side, i) for i in range(count)]


def _lead(count: int) -> list[Any]:
    """Names of leading dimensions, which broadcast from the right."""
    return [("lead", i) for i in reversed(range(count))]


def _broadcasting(
    a_core: tuple[str, ...], b_core: tuple[str, ...]
) -> Callable[[Operand, Operand], tuple[Labels, Labels, Labels]]:
    """Leading dimensions that broadcast, before the core dimensions; a vector has only "k"."""

    def names(a: Operand, b: Operand) -> tuple[Labels, Labels, Labels]:
        sides, cores = [], []
        for x, core in ((a, a_core), (b, b_core)):
            core = ("k",) if x.ndim == 1 else core
            cores += [name for name in core if name != "k"]
            sides.append([*_lead(x.ndim - len(core)), *core])
        rank = max(a.ndim - len(a_core), b.ndim - len(b_core), 0)
        return sides[0], sides[1], [*_lead(rank), *cores]

    return names
