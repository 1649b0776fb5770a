"""What every function of the dot family shares: jax's own signature, the policy, one contraction.

A function names the dimensions of its operands with labels, as einsum does with letters. jax's
function of the same name is evaluated abstractly first: it says which shape, dtype and weak type
the result has, and which arguments are refused. Then the policy decides whether the product is
quantized. docs/dot_family.md has both as tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _check, _compat, sharding
from jax_fp4.block_array import BlockScaledArray, check_array
from jax_fp4.product import Product, product, sides
from jax_fp4.recipe import Recipe, resolve
from jax_fp4.weight import prepared

Label = Hashable
Labels = Sequence[Label]
Operand = jax.Array | BlockScaledArray


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments that say nothing about dimensions."""

    where: str
    recipe: Recipe
    words: jax.Array | None  # the key as uint32[2]


def options(where: str, recipe: Recipe | None, key: Any, precision: Any) -> Options:
    """Checks what jax's functions do not have, and that ``precision`` is no algorithm."""
    resolved = resolve(where, recipe)
    _check.precision(where, precision)
    return Options(where, resolved, None if key is None else _check.key_words(where, key))


def operand(where: str, argument: str, x: Any) -> Operand:
    """What jax takes for an array, as an array; a quantized weight stays what it is."""
    if isinstance(x, BlockScaledArray):
        return check_array(where, argument, x)
    scalar = isinstance(x, (bool, int, float, complex))
    if not scalar and not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        if not hasattr(x, "__jax_array__"):
            _check.fail(
                where, argument, "an array", type(x).__name__, "pass jnp.asarray(...)", TypeError
            )
    if isinstance(x, np.ndarray):
        _check.byte_order(where, argument, x)
    return jnp.asarray(x)


# ---- What jax says -------------------------------------------------------------------------------


def reference(
    where: str, function: Callable[..., Any], operands: dict[str, Operand], out_sharding: Any
) -> Any:
    """Shape, dtype and weak type of ``function(*operands.values())``, evaluated abstractly.

    Shardings are left out: a quantized product decides what jax could not type by itself. Only
    ``out_sharding``, a keyword that ``function`` passes on, needs the mesh.

    Raises:
        Exception: what jax's function raises, of the same type, with our function's name.
    """
    abstract = [
        jax.ShapeDtypeStruct(
            x.shape, x.dtype, weak_type=isinstance(x, jax.Array) and jax.typeof(x).weak_type
        )
        for x in operands.values()
    ]
    try:
        with contextlib.nullcontext() if out_sharding is not None else _compat.without_mesh():
            return jax.eval_shape(function, *abstract)
    except (TypeError, ValueError, NotImplementedError, IndexError) as error:
        names = ", ".join(f"`{name}`" for name in operands)
        shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in operands.values())
        text = str(error).split("\n", 1)[0]
        try:
            worded = type(error)(
                f"jax_fp4.{where}: {names} must be what jax's function of that name takes with "
                f"the arguments beside them, got {shapes}; it says: {text}"
            )
        except TypeError:  # an exception of jax's that is made in another way
            raise error from None
        raise worded from None


# ---- The policy ----------------------------------------------------------------------------------


def reason_to_stay(
    recipe: Recipe, operands: Sequence[Operand], result: np.dtype, terms: int | None
) -> str | None:
    """Why a product is computed by jax as it is, or None where the recipe says what is done.

    Args:
        recipe: the recipe in force; its ``min_contraction`` counts.
        operands: of the product.
        result: dtype that jax gives the product.
        terms: products that are summed for one element of the result; None for a multiplication
            by a scalar.

    Returns:
        One word, which `explain` shows: "integers", the name of a dtype, "scalar", or
        "sum_of_<terms>".
    """
    names = [x.dtype.name for x in operands]
    others = [name for name in names if name not in _check.FLOAT_DTYPES]
    whole = [
        name for name in others if jnp.issubdtype(jnp.dtype(name), jnp.integer) or name == "bool"
    ]
    if len(whole) == len(names):
        return "integers"
    if len(whole) < len(others):
        return next(name for name in others if name not in whole)
    if result.name not in _check.FLOAT_DTYPES:
        return result.name
    if terms is None:
        return "scalar"
    if terms < recipe.min_contraction:
        return f"sum_of_{terms}"
    return None


def scope(where: str, *words: str) -> Any:
    """A `jax.named_scope` that profiles show and `explain` reads."""
    return jax.named_scope(
        ".".join(["jax_fp4", where, *(re.sub(r"[^\w-]", "_", w) for w in words)])
    )


# ---- The contraction -----------------------------------------------------------------------------


def terms_of(lhs: Operand, left: Labels, rhs: Operand, right: Labels, out: Labels) -> int:
    """How many products are summed for one element of the result."""
    sizes = dict(zip(left, lhs.shape, strict=True))
    return math.prod(
        max(size, sizes[name])
        for name, size in zip(right, rhs.shape, strict=True)
        if name in sizes and name not in out
    )


def contract(
    lhs: Operand, left: Labels, rhs: Operand, right: Labels, out: Labels, dtype: Any, how: Options
) -> jax.Array:
    """The quantized product of operands whose dimensions are named.

    Args:
        lhs: an array.
        left: a name for each of its dimensions, all different.
        rhs: an array, or a quantized weight.
        right: as ``left``. A name that both have is a batch dimension where ``out`` has it and is
            contracted otherwise; a dimension of size 1 goes with any size of the other operand.
        out: names of the result, each from ``left`` or ``right``.
        dtype: of the result.
        how: recipe and key.

    Returns:
        An array with the dimensions ``out``.
    """
    sizes = dict(zip(right, rhs.shape, strict=True))
    lhs, left = _without_broadcast(lhs, left, sizes)
    rhs, right = _without_broadcast(rhs, right, dict(zip(left, lhs.shape, strict=True)))
    batch = [name for name in out if name in left and name in right]
    summed = [name for name in left if name in right and name not in batch]
    free = [[n for n in names if n not in batch and n not in summed] for names in (left, right)]
    shapes = {**dict(zip(left, lhs.shape, strict=True)), **dict(zip(right, rhs.shape, strict=True))}
    with scope(how.where, how.recipe.name):
        result = _product(lhs, left, rhs, right, batch, summed, free, dtype, how)
    names = [*batch, *free[0], *free[1]]
    result = sharding.reshape(result, [shapes[name] for name in names])
    return result.transpose([names.index(name) for name in out])


def _without_broadcast(
    x: Operand, names: Labels, other: dict[Label, int]
) -> tuple[Operand, list[Label]]:
    """``x`` without the dimensions of size 1 that the other operand has larger."""
    keep = [i for i, n in enumerate(names) if x.shape[i] != 1 or other.get(n, 1) == 1]
    if len(keep) == len(names):
        return x, list(names)
    assert not isinstance(x, BlockScaledArray)
    return sharding.reshape(x, [x.shape[i] for i in keep]), [names[i] for i in keep]


def _product(
    lhs: Operand,
    left: list[Label],
    rhs: Operand,
    right: list[Label],
    batch: list[Label],
    summed: list[Label],
    free: list[list[Label]],
    dtype: Any,
    how: Options,
) -> jax.Array:
    """The product as [batch, free of lhs, free of rhs], each one merged to one dimension."""
    lhs3, lhs_axis = _as_matrix(as_float(lhs), left, batch, summed, free[0])
    weight = None
    if isinstance(rhs, BlockScaledArray):
        rhs_axis = _check_weight(how.where, rhs, right, batch, summed)
        rhs3, weight = prepared(how.where, rhs, how.recipe)
    else:
        rhs3, rhs_axis = _as_matrix(as_float(rhs), right, batch, summed, free[1])
    lhs_side, rhs_side = sides(how.recipe, bool(batch), lhs_axis, rhs_axis)
    leaves, tree = jax.tree.flatten((lhs3, rhs3, weight, how.words))
    lhs3, rhs3, weight, words = jax.tree.unflatten(tree, _compat.vary_alike(*leaves))
    if weight is None:
        assert rhs3 is not None
        out = sharding.of_product(lhs3, rhs3, (lhs_axis, rhs_axis))
    else:
        out = sharding.of_product(lhs3, weight.forward.values, (lhs_axis, "cols"))
    spec = Product(lhs_side, rhs_side, jnp.dtype(dtype).name, out)
    return product(lhs3, rhs3, weight, words, spec)


def as_float(x: Operand) -> jax.Array:
    """An operand that may be quantized: integers beside floats as float32, which they become."""
    assert not isinstance(x, BlockScaledArray)
    return x if x.dtype.name in _check.FLOAT_DTYPES else x.astype(jnp.float32)


def _as_matrix(
    x: jax.Array, names: list[Label], batch: list[Label], summed: list[Label], free: list[Label]
) -> tuple[jax.Array, str]:
    """x as [B, free, K] or [B, K, free], whichever it already is; the axis that is contracted."""
    at = {name: i for i, name in enumerate(names)}
    b, k, f = (math.prod(x.shape[at[n]] for n in group) for group in (batch, summed, free))
    if [*batch, *summed, *free] == names and summed and free:
        return sharding.reshape(x, (b, k, f)), "rows"
    x = x.transpose([at[n] for n in (*batch, *free, *summed)])
    return sharding.reshape(x, (b, f, k)), "cols"


def _check_weight(
    where: str, q: BlockScaledArray, names: list[Label], batch: list[Label], summed: list[Label]
) -> str:
    """A quantized right operand is a matrix, contracted along the axis that it is quantized on."""
    if q.ndim != 2 or batch or [names[q.axis]] != summed:
        _check.fail(
            where,
            "rhs",
            "a matrix contracted along the axis that it is quantized on, without batch dimensions",
            f"shape {q.shape} quantized along axis {q.axis}, contracted along "
            f"{[i for i, name in enumerate(names) if name in summed]}",
            "name the axis in quantize_weight(w, axis=...), or use jax.vmap for stacked weights",
        )
    return "cols" if q.axis == -1 else "rows"


def finish(result: jax.Array, like: Any, out_sharding: Any = None) -> jax.Array:
    """``result`` with the weak type that jax gives it, sharded as asked for."""
    if like.weak_type:
        result = _compat.weakly_typed(result)
    if out_sharding is None:
        return result
    return jax.sharding.reshard(result, out_sharding)


def binary(
    function: Callable[..., Any],
    operands: tuple[tuple[str, Any], tuple[str, Any]],
    names: Callable[[Operand, Operand], tuple[Labels, Labels, Labels]],
    keywords: dict[str, Any],
    recipe: Recipe | None,
    key: Any,
    reshape: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """A function of jax's of two operands, quantized where the policy says so.

    Args:
        function: jax's; its name is that of ours.
        operands: argument name and value of each.
        names: ``(lhs, rhs) -> (labels of lhs, of rhs, of the result)``, for operands that
            ``function`` takes; only called where something is quantized or summed.
        keywords: of ``function``.
        recipe: as users give it.
        key: as users give it.
        reshape: of each operand before it is quantized.

    Returns:
        What ``function`` returns, up to quantization.
    """
    where = function.__name__
    how = options(where, recipe, key, keywords.get("precision"))
    lhs, rhs = (operand(where, name, x) for name, x in operands)
    if isinstance(lhs, BlockScaledArray):
        _check.fail(
            where,
            operands[0][0],
            "an array",
            type(lhs).__name__,
            "quantized weights stand on the right; scaled_matmul takes two quantized operands",
            TypeError,
        )

    def call(*arrays: Any) -> Any:
        return function(*arrays, **keywords)

    named = dict(zip((name for name, _ in operands), (lhs, rhs), strict=True))
    like = reference(where, call, named, keywords.get("out_sharding"))
    scalar = lhs.ndim == 0 or rhs.ndim == 0
    if reshape is not None and not isinstance(rhs, BlockScaledArray):
        lhs, rhs = reshape(lhs), reshape(rhs)
    left, right, out = ((), (), ()) if scalar else names(lhs, rhs)
    terms = None if scalar else terms_of(lhs, left, rhs, right, out)
    reason = reason_to_stay(how.recipe, (lhs, rhs), like.dtype, terms)
    if reason is None:
        result = contract(lhs, left, rhs, right, out, like.dtype, how)
        return finish(result, like, keywords.get("out_sharding"))
    if isinstance(rhs, BlockScaledArray):
        rhs = refuse_weight(where, operands[1][0], reason)
    with scope(where, "as_it_is", reason):
        return call(lhs, rhs)


def refuse_weight(where: str, argument: str, reason: str) -> Any:
    """A quantized weight in a product that the policy does not quantize."""
    return _check.fail(
        where,
        argument,
        "an array where the product is not quantized",
        f"a BlockScaledArray ({reason})",
        "pass the weight itself, or float operands with a longer contraction",
    )
