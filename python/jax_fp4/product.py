"""One product of matrices [B, rows, cols] with quantized operands, and its gradients.

Each operand comes in the orientation that it has: the quantizer makes the copy along either axis,
so nothing is transposed for it. Names follow recipe.py: x and w are the operands, dy the cotangent.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_fp4.block_array import BlockScaledArray
from jax_fp4.copies import Copy, amax_for_copies, make_copies
from jax_fp4.matmul import multiply
from jax_fp4.recipe import Operand, Recipe

RESIDUAL_NAME = "quantization"
"""`checkpoint_name` of the quantized residuals, for remat policies."""

_DGRAD_STREAM, _WGRAD_STREAM = 0, 1  # so that one seed serves both copies of dy


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand [B, free, K] ("cols") or [B, K, free] ("rows"), and the recipe's roles for it."""

    contract_axis: str  # the axis, "cols" or "rows", that the forward product contracts
    forward: Operand | None  # this operand in the forward product
    backward: Operand | None  # this operand in the other one's gradient
    cotangent: Operand | None  # dy in this operand's gradient
    stream: int  # of dy in this operand's gradient

    @property
    def free_axis(self) -> str:
        """The axis that this operand's copy for the other one's gradient contracts."""
        return "rows" if self.contract_axis == "cols" else "cols"


@dataclasses.dataclass(frozen=True)
class Product:
    """What is static about one product lhs . rhs."""

    lhs: Side
    rhs: Side
    out_dtype: str


def _copy(operand: Operand, axis: str, stream: int = 0) -> Copy:
    return Copy(
        format=operand.format,
        axis=axis,
        scaling=operand.scaling,
        rounding=operand.rounding,
        signs=operand.signs,
        scale_rule=operand.scale_rule,
        four_over_six=operand.four_over_six,
        stream=stream,
        layout="tiled",
    )


# ---- Matrices in the form that a product takes ---------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Plain:
    """An operand that a recipe leaves as it is: bfloat16 [B, rows, cols], contracted along axis."""

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
                signs=copy.signs,
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
    contract = ((2,) if a.axis == "cols" else (1,)), ((2,) if b.axis == "cols" else (1,))
    product = jax.lax.dot_general(
        a.value, b.value, (contract, ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return product.astype(out_dtype)


# ---- The product with its gradients --------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(lhs: jax.Array, rhs: jax.Array, key: jax.Array | None, spec: Product) -> jax.Array:
    """lhs . rhs with the gradients that the recipe asks for.

    Args:
        lhs: float32, bfloat16 or float16 [B, M, K] or [B, K, M], as ``spec.lhs`` says.
        rhs: float32, bfloat16 or float16 [B, N, K] or [B, K, N], as ``spec.rhs`` says.
        key: uint32[2] for the stochastic copies of the cotangent; None takes its fingerprint.
        spec: the static rest.

    Returns:
        ``spec.out_dtype`` [B, M, N].
    """
    (a,) = _matrices(lhs, [(spec.lhs.forward, spec.lhs.contract_axis, 0)])
    (b,) = _matrices(rhs, [(spec.rhs.forward, spec.rhs.contract_axis, 0)])
    return _multiply(a, b, spec.out_dtype)


def _product_fwd(
    lhs: jax.Array, rhs: jax.Array, key: jax.Array | None, spec: Product
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


def _product_bwd(spec: Product, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
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


product.defvjp(_product_fwd, _product_bwd)


def sides(recipe: Recipe, has_batch: bool, lhs_axis: str, rhs_axis: str) -> tuple[Side, Side]:
    """The roles of lhs and rhs: which of them is x and which is w."""
    fprop_w, dgrad_w = recipe.fprop_w, recipe.dgrad_w
    if recipe.weight == "auto" and has_batch:
        fprop_w, dgrad_w = (
            None if operand is None else dataclasses.replace(operand, scaling="1d")
            for operand in (fprop_w, dgrad_w)
        )

    def x_side(axis: str) -> Side:
        return Side(axis, recipe.fprop_x, recipe.wgrad_x, recipe.dgrad_dy, _DGRAD_STREAM)

    def w_side(axis: str) -> Side:
        return Side(axis, fprop_w, dgrad_w, recipe.wgrad_dy, _WGRAD_STREAM)

    if recipe.weight == "lhs":
        return w_side(lhs_axis), x_side(rhs_axis)
    return x_side(lhs_axis), w_side(rhs_axis)
