"""dot, matmul and dot_general: where jnp's and lax's functions stood.

They only name dimensions: every one of them becomes one product of matrices (product.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _check, _compat
from jax_fp4.product import Product, product, sides
from jax_fp4.recipe import Recipe, resolve


def _as_matrix(
    x: jax.Array, batch: Sequence[int], contract: Sequence[int], free: Sequence[int]
) -> tuple[jax.Array, str]:
    """x as [B, free, K] or [B, K, free], whichever it already is; the axis that is contracted."""
    sizes = [[x.shape[i] for i in group] for group in (batch, free, contract)]
    b, f, k = (math.prod(group) for group in sizes)
    if (*batch, *contract, *free) == tuple(range(x.ndim)) and contract and free:
        return x.reshape(b, k, f), "rows"
    return x.transpose(*batch, *free, *contract).reshape(b, f, k), "cols"


def _check_operand(where: str, name: str, x: Any) -> jax.Array:
    return _check.float_array(where, name, x)


def _check_precision(where: str, precision: Any) -> None:
    """Precision values say nothing about a quantized product and are accepted; algorithms do."""
    for item in precision if isinstance(precision, tuple) else (precision,):
        try:
            jax.lax.Precision(item)  # None, a Precision, or one of JAX's names for it
        except (ValueError, TypeError):
            is_algorithm = isinstance(item, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset, str))
            _check.fail(
                where,
                "precision",
                "None, a jax.lax.Precision, or a tuple of two of them",
                repr(item),
                "an explicit algorithm contradicts a quantized product; use jax.lax.dot_general"
                if is_algorithm
                else "drop it: it has no effect on a quantized product",
            )


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` with quantized operands.

    Args:
        lhs: float32, bfloat16 or float16.
        rhs: float32, bfloat16 or float16.
        dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as in lax.
            Batch dimensions have an amax each; the others are flattened to one matrix with one.
        precision: accepted, without effect; an explicit algorithm is refused.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        recipe: how operands and gradients are quantized; by default that of `use_recipe`, or else
            ``recipes.NVFP4``.
        key: a jax.random key for stochastic rounding in the backward pass. Without one the seed is
            made from the bits of the cotangent: reproducible, and different at every step.

    Returns:
        Batch dimensions, then free dimensions of lhs, then of rhs.

    Raises:
        TypeError: an operand is no float array, or the second derivative is asked for.
        ValueError: dimension numbers or shapes do not go together.
    """
    where = "dot_general"
    lhs, rhs = _check_operand(where, "lhs", lhs), _check_operand(where, "rhs", rhs)
    return _dot_general(
        where, lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe, key
    )


def _dot_general(
    where: str,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    recipe: Recipe | None,
    key: jax.Array | None,
) -> jax.Array:
    recipe = resolve(where, recipe)
    _check_precision(where, precision)
    words = None if key is None else _check.key_words(where, key)
    out = jnp.result_type(lhs, rhs)
    if preferred_element_type is not None:
        out = _check.float_dtype(where, "preferred_element_type", preferred_element_type)
    contract, batch = _dimension_numbers(where, lhs, rhs, dimension_numbers)
    lhs, rhs = _compat.gathered(lhs), _compat.gathered(rhs)
    free = [
        [i for i in range(x.ndim) if i not in c and i not in b]
        for x, c, b in zip((lhs, rhs), contract, batch, strict=True)
    ]
    lhs3, lhs_axis = _as_matrix(lhs, batch[0], contract[0], free[0])
    rhs3, rhs_axis = _as_matrix(rhs, batch[1], contract[1], free[1])
    lhs_side, rhs_side = sides(recipe, bool(batch[0]), lhs_axis, rhs_axis)
    lhs3, rhs3, *rest = _compat.vary_alike(lhs3, rhs3, *([] if words is None else [words]))
    spec = Product(lhs_side, rhs_side, out_dtype=out.name)
    result: jax.Array = product(lhs3, rhs3, rest[0] if rest else None, spec)
    return result.reshape(
        *(lhs.shape[i] for i in batch[0]),
        *(lhs.shape[i] for i in free[0]),
        *(rhs.shape[i] for i in free[1]),
    )


def _dimension_numbers(
    where: str, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Checked (contract, batch) dimensions of lhs and rhs, non-negative, in lhs's order."""
    way_out = "pass ((lhs contracting, rhs contracting), (lhs batch, rhs batch)) as in jax.lax"
    try:
        pairs = [[[operator.index(i) for i in side] for side in pair] for pair in dimension_numbers]
        (lc, rc), (lb, rb) = pairs
    except (TypeError, ValueError):
        _check.fail(
            where,
            "dimension_numbers",
            "two pairs of dimension lists",
            repr(dimension_numbers),
            way_out,
        )
    for name, x, groups in (("lhs", lhs, (lc, lb)), ("rhs", rhs, (rc, rb))):
        every = [i for group in groups for i in group]
        if any(not -x.ndim <= i < x.ndim for i in every) or len({i % x.ndim for i in every}) != len(
            every
        ):
            _check.fail(
                where,
                "dimension_numbers",
                f"distinct dimensions of {name} with shape {x.shape}",
                str(every),
                way_out,
            )
        for group in groups:
            group[:] = [i % x.ndim for i in group]
    for kind, left, right in (("contracting", lc, rc), ("batch", lb, rb)):
        sizes = [[x.shape[i] for i in dims] for x, dims in ((lhs, left), (rhs, right))]
        if sizes[0] != sizes[1]:
            _check.fail(
                where,
                "rhs",
                f"of sizes {sizes[0]} in its {kind} dimensions {right}, those of lhs {lhs.shape}",
                f"{sizes[1]} (shape {rhs.shape})",
                "check the dimension numbers",
            )
    order = sorted(range(len(lc)), key=lambda i: lc[i])
    return [[lc[i] for i in order], [rc[i] for i in order]], [lb, rb]


def dot(
    a: Any,
    b: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.dot` with quantized operands and quantized gradients.

    The last axis of ``a`` is contracted with the last but one of ``b`` (its only one, if it is a
    vector); a scalar multiplies. ``a``'s other dimensions are flattened to one matrix.

    Args:
        a: float32, bfloat16 or float16, of any rank.
        b: float32, bfloat16 or float16, of any rank.
        precision: accepted, without effect; an explicit algorithm is refused.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        An array of shape ``a.shape[:-1] + b.shape[:-2] + b.shape[-1:]``.

    Raises:
        TypeError: an operand is no float array.
        ValueError: the contracted sizes differ.
    """
    where = "dot"
    scalars = [isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b)]
    a, b = (
        x if scalar else _check_operand(where, name, x)
        for name, x, scalar in zip("ab", (a, b), scalars, strict=True)
    )
    if any(scalars) or a.ndim == 0 or b.ndim == 0:
        resolve(where, recipe)
        _check_precision(where, precision)
        if key is not None:
            _check.key_words(where, key)
        scaled = jnp.multiply(a, b)
        if preferred_element_type is None:
            return scaled
        return scaled.astype(
            _check.float_dtype(where, "preferred_element_type", preferred_element_type)
        )
    axis = b.ndim - 1 if b.ndim == 1 else b.ndim - 2
    _check_contracted(where, a, b, axis)
    dims = (((a.ndim - 1,), (axis,)), ((), ()))
    return _dot_general(where, a, b, dims, precision, preferred_element_type, recipe, key)


def _check_contracted(where: str, a: jax.Array, b: jax.Array, axis: int) -> None:
    if a.shape[-1] != b.shape[axis]:
        _check.fail(
            where,
            "b",
            f"of size {a.shape[-1]} in dimension {axis}, the last of a with shape {a.shape}",
            f"shape {b.shape}",
            "transpose b, or use dot_general to name the dimensions",
        )


def matmul(
    a: Any,
    b: Any,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.matmul` with quantized operands and quantized gradients.

    Args:
        a: float32, bfloat16 or float16 [..., M, K] or [K].
        b: float32, bfloat16 or float16 [..., K, N] or [K].
        precision: accepted, without effect; an explicit algorithm is refused.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        recipe: see `dot_general`.
        key: see `dot_general`.

    Returns:
        [..., M, N], leading dimensions broadcast; those that only one operand has, or that are 1 in
        the other one, are no batch dimensions but rows of one matrix.

    Raises:
        TypeError: an operand is no float array.
        ValueError: an operand is a scalar, or shapes do not go together.
    """
    where = "matmul"
    a, b = _check_operand(where, "a", a), _check_operand(where, "b", b)
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            _check.fail(where, name, "of rank 1 or more", "a scalar", "use jnp.multiply")
    _check_contracted(where, a, b, b.ndim - 1 if b.ndim == 1 else b.ndim - 2)
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    rank = max(len(lead_a), len(lead_b))
    wide_a, wide_b = ((1,) * (rank - len(lead)) + lead for lead in (lead_a, lead_b))
    if any(m != n and 1 not in (m, n) for m, n in zip(wide_a, wide_b, strict=True)):
        _check.fail(
            where,
            "b",
            f"of leading dimensions that broadcast with {lead_a}, those of a",
            str(lead_b),
            "check the shapes",
        )
    # A leading dimension that one operand lacks, or has with size 1 beside a larger one, is free.
    lacks_a, lacks_b = rank - len(lead_a), rank - len(lead_b)
    only_a = [i for i in range(rank) if i < lacks_b or (wide_b[i] == 1 != wide_a[i])]
    only_b = [i for i in range(rank) if i < lacks_a or (wide_a[i] == 1 != wide_b[i])]
    common = [i for i in range(rank) if i not in only_a and i not in only_b]
    a_core, b_core = a.shape[-2:], b.shape[-2:]
    a = a.reshape(*(wide_a[i] for i in range(rank) if i not in only_b), *a_core)
    b = b.reshape(*(wide_b[i] for i in range(rank) if i not in only_a), *b_core)
    a_dims = [i for i in range(rank) if i not in only_b]
    b_dims = [i for i in range(rank) if i not in only_a]
    batch = ([a_dims.index(i) for i in common], [b_dims.index(i) for i in common])
    contract = ((a.ndim - 1,), (b.ndim - 1 if len(b_core) == 1 else b.ndim - 2,))
    out = _dot_general(
        where, a, b, (contract, batch), precision, preferred_element_type, recipe, key
    )
    # out: common, only_a, M (if a is a matrix), only_b, N (if b is a matrix)
    names = [*common, *only_a, *(["M"] * (len(a_core) - 1)), *only_b, *(["N"] * (len(b_core) - 1))]
    wanted = [*range(rank), *(name for name in ("M", "N") if name in names)]
    return out.transpose([names.index(name) for name in wanted])
