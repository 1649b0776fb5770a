"""einsum: planned as jnp.einsum plans it, every product of two operands quantized by the policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4.block_array import BlockScaledArray
from jax_fp4.contraction import (
    Operand,
    Options,
    contract,
    finish,
    operand,
    options,
    reason_to_stay,
    reference,
    refuse_weight,
    scope,
    terms_of,
)
from jax_fp4.recipe import Recipe

_WHERE = "einsum"


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.numpy.einsum` with quantized operands and quantized gradients.

    Operands are contracted two at a time, in the order that jnp.einsum finds. Indices that only one
    operand has are summed, and diagonals are taken, before anything is quantized. Of two operands,
    the one that comes first in the call, or was made from it, is the left one; with the weight role
    of the recipe on "auto" the other one is the weight, unless there are batch indices.

    Args:
        subscripts: as in jnp.einsum; or the first operand of the form
            ``einsum(a, [0, 1], b, [1, 2], [0, 2])``.
        *operands: float32, bfloat16 or float16; others are left to jax (docs/dot_family.md). One
            that stands on the right may be what `quantize_weight` returned.
        out: not supported, as in jnp.
        optimize: how the order is found, as in jnp.einsum.
        precision: see `dot_general`.
        preferred_element_type: dtype of the result and of products on the way to it; by default the
            promoted dtype.
        out_sharding: see `dot_general`.
        recipe: see `dot_general`.
        key: see `dot_general`. Every product draws from it.

    Returns:
        What jnp.einsum returns, up to quantization.

    Raises:
        Exception: what jnp.einsum raises for these arguments, of the same type.
    """
    how = options(_WHERE, recipe, key, precision)
    given = [subscripts, *operands]
    places = _places(given)
    named = {f"operands[{n}]": given[i] for n, i in enumerate(places)}
    arrays = [operand(_WHERE, name, x) for name, x in named.items()]
    keywords: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }

    def filled(values: Any) -> list[Any]:
        call = list(given)
        for i, value in zip(places, values, strict=True):
            call[i] = value
        return call

    def whole(*values: Any) -> Any:
        return jnp.einsum(
            *filled(values), out=out, optimize=optimize, out_sharding=out_sharding, **keywords
        )

    like = reference(_WHERE, whole, dict(zip(named, arrays, strict=True)), out_sharding)
    if len(arrays) < 2:
        return whole(*arrays)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    _, info = jnp.einsum_path(*filled(shapes), optimize=optimize)
    # One number for each operand or intermediate result: that of the first operand in it.
    waiting: list[tuple[int, Operand]] = list(enumerate(arrays))
    for inputs, _, expression, *_ in info.contraction_list:
        taken = [waiting.pop(i) for i in inputs]
        names, result = expression.split("->")
        parts = sorted(
            ((first, x, own) for (first, x), own in zip(taken, names.split(","), strict=True)),
            key=lambda part: part[0],
        )
        made = _step(parts, result, like.dtype, how, precision)
        waiting.append((parts[0][0], made))
    ((_, value),) = waiting
    assert isinstance(value, jax.Array)
    return finish(value.astype(like.dtype), like, out_sharding)


def _places(given: list[Any]) -> list[int]:
    """Which arguments are operands, in either form of the call."""
    if isinstance(given[0], str):
        return list(range(1, len(given)))
    return list(range(0, len(given) - len(given) % 2, 2))


def _step(
    parts: list[tuple[int, Operand, str]], result: str, dtype: Any, how: Options, precision: Any
) -> jax.Array:
    """One step of the plan: the sum over an operand, or the product of two."""
    if len(parts) == 1:
        ((_, x, own),) = parts
        return jnp.einsum(
            f"{own}->{result}", _array(x, "one operand"), preferred_element_type=dtype
        )
    (_, lhs, left), (_, rhs, right) = parts
    sizes = [dict(zip(n, x.shape, strict=True)) for n, x in ((left, lhs), (right, rhs))]
    lhs, left = _alone(lhs, left, sizes[1], result, dtype)
    rhs, right = _alone(rhs, right, sizes[0], result, dtype)
    reason = reason_to_stay(
        how.recipe, (lhs, rhs), jnp.dtype(dtype), terms_of(lhs, left, rhs, right, result)
    )
    if reason is None:
        return contract(_array(lhs, "left operand"), left, rhs, right, result, dtype, how)
    with scope(_WHERE, "as_it_is", reason):
        return jnp.einsum(
            f"{left},{right}->{result}",
            _array(lhs, reason),
            _array(rhs, reason),
            precision=precision,
            preferred_element_type=dtype,
        )


def _array(x: Operand, reason: str) -> jax.Array:
    return refuse_weight(_WHERE, "operands", reason) if isinstance(x, BlockScaledArray) else x


def _alone(
    x: Operand, names: str, other: dict[str, int], result: str, dtype: Any
) -> tuple[Operand, str]:
    """``x`` with every index once, and none that neither ``result`` nor the other operand needs.

    A dimension of size 1 beside a larger one of the other operand goes; if it was to be contracted,
    the other operand sums its own.
    """
    sizes = dict(zip(names, x.shape, strict=True))
    counts = Counter(names)
    keep = ""
    for name in counts:
        broadcast = sizes[name] == 1 and other.get(name, 1) != 1
        summed_by_other = other.get(name, 0) == 1 and sizes[name] != 1
        if not broadcast and (name in result or (name in other and not summed_by_other)):
            keep += name
    if keep == names:
        return x, names
    array = _array(x, f"{names}->{keep}")
    return jnp.einsum(f"{names}->{keep}", array, preferred_element_type=_wide(array, dtype)), keep


def _wide(x: jax.Array, dtype: Any) -> Any:
    """The dtype that jnp.einsum sums in: that of the result if it is wider than the operand's."""
    wanted = jnp.promote_types(x.dtype, dtype)
    return x.dtype if wanted == x.dtype else dtype
