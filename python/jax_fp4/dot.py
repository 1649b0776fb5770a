"""dot, matmul and dot_general: products whose operands are quantized, with gradients.

A dot_general becomes products of matrices [B, rows, cols], each operand in the orientation it
already has: the quantizer makes the copy along either axis, so nothing is transposed for it. Names
follow recipe.py: x and w are the operands, dy the cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_fp4 import _check
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.matmul import multiply
from jax_fp4.quantize import DEFAULT_SIGNS, Copy, amax_for_copies, make_copies
from jax_fp4.recipe import Operand, Recipe, resolve

RESIDUAL_NAME = "quantization"
"""`checkpoint_name` of the quantized residuals, for remat policies."""

_DGRAD_STREAM, _WGRAD_STREAM = 0, 1  # so that one seed serves both copies of dy


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand [B, free, K] ("cols") or [B, K, free] ("rows"), and the recipe's roles for it."""

    contract_axis: str  # the axis, "cols" or "rows", that the forward product contracts
    forward: Operand | None  # this operand in the forward product
    backward: Operand | None  # this operand in the other one's gradient
    cotangent: Operand | None  # dy in this operand's gradient
    stream: int  # of dy in this operand's gradient

    @property
    def free_axis(self) -> str:
        return "rows" if self.contract_axis == "cols" else "cols"


@dataclasses.dataclass(frozen=True)
class _Product:
    """What is static about one product lhs . rhs."""

    lhs: _Side
    rhs: _Side
    out_dtype: str


def _copy(operand: Operand, axis: str, stream: int = 0) -> Copy:
    return Copy(
        format=operand.format,
        axis=axis,
        scaling=operand.scaling,
        rounding=operand.rounding,
        signs=_check.signs("Recipe", "hadamard", operand.hadamard, DEFAULT_SIGNS),
        scale_rule=operand.scale_rule,
        four_over_six=operand.four_over_six,
        stream=stream,
        layout="tiled",
    )


# ---- Matrices in the form that a product takes ---------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Plain:
    """An operand that a recipe leaves unquantized: bfloat16 [B, rows, cols], contracted along axis."""

    value: jax.Array
    axis: str = dataclasses.field(metadata={"static": True})


_Matrix = BlockScaledArray | _Plain


def _matrices(
    x: jax.Array, wanted: Sequence[tuple[Operand | None, str, int]], key: jax.Array | None = None
) -> list[_Matrix]:
    """x [B, rows, cols] prepared for each (operand, axis, stream), with one pass for the copies."""
    copies = [
        _copy(operand, axis, stream) for operand, axis, stream in wanted if operand is not None
    ]
    x4 = x[None]
    from_data = key is None and any(copy.stochastic for copy in copies)
    amax, prints = amax_for_copies(x4, copies, fingerprint=from_data)
    seed = _data_seed(prints, x.shape) if prints is not None else None
    if key is not None:
        seed = key[None]
    made = iter(make_copies(x4, copies, amax, [seed] * len(copies)) if copies else [])
    described = iter(copies)
    result: list[_Matrix] = []
    for operand, axis, _ in wanted:
        if operand is None:
            result.append(_Plain(x.astype(jnp.bfloat16), axis))
            continue
        copy, (values, scales, global_scale) = next(described), next(made)
        result.append(
            BlockScaledArray(
                values=values[0],
                scales=scales[0],
                global_scale=global_scale[0],
                amax=None,
                format=copy.format,
                axis=-1 if axis == "cols" else -2,
                layout=copy.layout,
                length=copy.shape(*x.shape[1:])[1],
                dtype=x.dtype,
            )
        )
    return result


def _data_seed(prints: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Seeds uint32 [V, 2] from fingerprints uint32 [V] and the static shape."""

    def mix(h: jax.Array) -> jax.Array:  # the finalizer of MurmurHash3: a bijection of 32 bits
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EB_CA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2_AE35)
        return h ^ (h >> 16)

    salt = jnp.uint32(zlib.crc32(repr(tuple(shape)).encode()))
    low = mix(prints ^ salt)
    high = mix(low + jnp.uint32(0x9E37_79B9))
    return jnp.stack([low, high], axis=-1)


def _multiply(a: _Matrix, b: _Matrix, out_dtype: Any) -> jax.Array:
    """[B, M, N] of a [B, M, K] and b [B, N, K], each contracted along its own axis."""
    if isinstance(a, BlockScaledArray) and isinstance(b, BlockScaledArray):
        return multiply(a, b, out_dtype)
    assert isinstance(a, _Plain) and isinstance(b, _Plain)
    contract = tuple(((2,) if m.axis == "cols" else (1,)) for m in (a, b))
    product = jax.lax.dot_general(
        a.value, b.value, (contract, ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return product.astype(out_dtype)


# ---- The product with its gradients --------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(lhs: jax.Array, rhs: jax.Array, key: jax.Array | None, spec: _Product) -> jax.Array:
    (a,) = _matrices(lhs, [(spec.lhs.forward, spec.lhs.contract_axis, 0)])
    (b,) = _matrices(rhs, [(spec.rhs.forward, spec.rhs.contract_axis, 0)])
    return _multiply(a, b, spec.out_dtype)


def _product_fwd(
    lhs: jax.Array, rhs: jax.Array, key: jax.Array | None, spec: _Product
) -> tuple[jax.Array, Any]:
    a, lhs_saved = _matrices(
        lhs,
        [(spec.lhs.forward, spec.lhs.contract_axis, 0), (spec.lhs.backward, spec.lhs.free_axis, 0)],
    )
    b, rhs_saved = _matrices(
        rhs,
        [(spec.rhs.forward, spec.rhs.contract_axis, 0), (spec.rhs.backward, spec.rhs.free_axis, 0)],
    )
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL_NAME), (lhs_saved, rhs_saved))
    like = (jnp.zeros((0,), lhs.dtype), jnp.zeros((0,), rhs.dtype))
    return _multiply(a, b, spec.out_dtype), (*saved, key, like)


def _product_bwd(spec: _Product, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    lhs_saved, rhs_saved, key, (lhs_like, rhs_like) = residuals
    # dy is [B, M, N]: the gradient of lhs contracts N ("cols"), that of rhs contracts M ("rows").
    for_lhs, for_rhs = _matrices(
        dy,
        [
            (spec.lhs.cotangent, "cols", spec.lhs.stream),
            (spec.rhs.cotangent, "rows", spec.rhs.stream),
        ],
        key,
    )
    # Each gradient comes out in the orientation of its primal.
    if spec.lhs.contract_axis == "cols":
        dlhs = _multiply(for_lhs, rhs_saved, lhs_like.dtype)  # [B, M, K]
    else:
        dlhs = _multiply(rhs_saved, for_lhs, lhs_like.dtype)  # [B, K, M]
    if spec.rhs.contract_axis == "cols":
        drhs = _multiply(for_rhs, lhs_saved, rhs_like.dtype)  # [B, N, K]
    else:
        drhs = _multiply(lhs_saved, for_rhs, rhs_like.dtype)  # [B, K, N]
    dkey = None if key is None else np.zeros(key.shape, jax.dtypes.float0)
    return dlhs, drhs, dkey


_product.defvjp(_product_fwd, _product_bwd)


def _sides(recipe: Recipe, has_batch: bool, lhs_axis: str, rhs_axis: str) -> tuple[_Side, _Side]:
    """The roles of lhs and rhs: which of them is x and which is w."""
    fprop_w, dgrad_w = recipe.fprop_w, recipe.dgrad_w
    if recipe.weight == "auto" and has_batch:
        fprop_w, dgrad_w = (
            None if operand is None else dataclasses.replace(operand, scaling="1d")
            for operand in (fprop_w, dgrad_w)
        )

    def x_side(axis: str) -> _Side:
        return _Side(axis, recipe.fprop_x, recipe.wgrad_x, recipe.dgrad_dy, _DGRAD_STREAM)

    def w_side(axis: str) -> _Side:
        return _Side(axis, fprop_w, dgrad_w, recipe.wgrad_dy, _WGRAD_STREAM)

    if recipe.weight == "lhs":
        return w_side(lhs_axis), x_side(rhs_axis)
    return x_side(lhs_axis), w_side(rhs_axis)


# ---- Public functions ----------------------------------------------------------------------------


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
    if isinstance(x, (bool, int, float, list, tuple)):
        x = jnp.asarray(x)
    return _check.float_array(where, name, x)


def _check_precision(where: str, precision: Any) -> None:
    """Precision values say nothing about a quantized product and are accepted; algorithms do."""
    for item in precision if isinstance(precision, tuple) else (precision,):
        if item is None or isinstance(item, jax.lax.Precision):
            continue
        if isinstance(item, str) and item.lower() in ("default", "high", "highest", "fastest"):
            continue
        _check.fail(
            where,
            "precision",
            "None, a jax.lax.Precision, or a pair of them",
            repr(item),
            "an explicit algorithm contradicts a quantized product; use jax.lax.dot_general for it",
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
    out = jnp.promote_types(lhs.dtype, rhs.dtype)
    if preferred_element_type is not None:
        out = _check.float_dtype(where, "preferred_element_type", preferred_element_type)
    contract, batch = _dimension_numbers(where, lhs, rhs, dimension_numbers)
    free = [
        [i for i in range(x.ndim) if i not in c and i not in b]
        for x, c, b in zip((lhs, rhs), contract, batch, strict=True)
    ]
    lhs3, lhs_axis = _as_matrix(lhs, batch[0], contract[0], free[0])
    rhs3, rhs_axis = _as_matrix(rhs, batch[1], contract[1], free[1])
    sides = _sides(recipe, bool(batch[0]), lhs_axis, rhs_axis)
    product = _product(lhs3, rhs3, words, _Product(*sides, out_dtype=out.name))
    return product.reshape(
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
        pairs = [[[int(i) for i in side] for side in pair] for pair in dimension_numbers]
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
    a, b = _check_operand(where, "a", a), _check_operand(where, "b", b)
    if a.ndim == 0 or b.ndim == 0:
        resolve(where, recipe)
        _check_precision(where, precision)
        product = jnp.multiply(a, b)
        return product if preferred_element_type is None else product.astype(preferred_element_type)
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
