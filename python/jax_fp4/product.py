"""One product of matrices [B, rows, cols] with quantized operands, and its gradients.

Each operand comes in the orientation that it has: the quantizer makes the copy along either axis,
so nothing is transposed for it. Names follow recipe.py: x and w are the operands, dy the cotangent.
The named scopes "fprop", "dgrad" and "wgrad" are what `explain` tells the three products by.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_fp4 import sharding
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.copies import Copy, amax_for_copies, decode, make_copies
from jax_fp4.matmul import multiply
from jax_fp4.recipe import Operand, Recipe

RESIDUAL_NAME = "quantization"
"""`checkpoint_name` of the quantized residuals, for remat policies."""

DGRAD_STREAM, WGRAD_STREAM = 0, 1  # so that one seed serves both copies of dy


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

    @property
    def gradient(self) -> str:
        """What the product that gives this operand's gradient is called."""
        return "dgrad" if self.stream == DGRAD_STREAM else "wgrad"


@dataclasses.dataclass(frozen=True)
class Product:
    """What is static about one product lhs . rhs."""

    lhs: Side
    rhs: Side
    out_dtype: str
    out_sharding: jax.NamedSharding | None = None


def _copy(operand: Operand, axis: str, stream: int, layout: str) -> Copy:
    return Copy(
        format=operand.format,
        axis=axis,
        scaling=operand.scaling,
        rounding=operand.rounding,
        signs=operand.signs,
        scale_rule=operand.scale_rule,
        four_over_six=operand.four_over_six,
        stream=stream,
        layout=layout,
    )


# ---- Matrices in the form that a product takes ---------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain:
    """An operand of a product in bfloat16: [B, rows, cols], contracted along axis.

    ``factor`` and ``stored`` are those of a weight that was decoded: the tensor scale f32 [B],
    which multiplies the sums, and the name of the format.
    """

    value: jax.Array
    axis: str = dataclasses.field(metadata={"static": True})
    factor: jax.Array | None = None
    stored: str = dataclasses.field(default="bfloat16", metadata={"static": True})


Matrix = BlockScaledArray | Plain


def matrices(
    x: jax.Array,
    wanted: Sequence[tuple[Operand | None, str, int]],
    key: jax.Array | None = None,
    *,
    layout: str = "tiled",
    share_amax: Callable[[jax.Array], jax.Array] = lambda bits: bits,
    given_amax: jax.Array | None = None,
) -> list[Matrix]:
    """x [B, rows, cols] prepared for each (operand, axis, stream), with one pass for the copies.

    Args:
        x: float32, bfloat16 or float16.
        wanted: how each matrix is made.
        key: uint32[2] for stochastic copies; None takes the fingerprint of x.
        layout: of the scales; "tiled" becomes "linear" where a shard may hold no whole tiles.
        share_amax: the amax to use, uint32 [1, B], from that of each matrix of x.
        given_amax: float32 [B], instead of that of x; not for rotated or stochastic copies.
    """
    copies = [
        _copy(operand, axis, stream, layout)
        for operand, axis, stream in wanted
        if operand is not None
    ]
    copies = [
        copy
        if sharding.parts_align(x, copy.step("rows"), copy.step("cols"))
        else dataclasses.replace(copy, layout="linear")
        for copy in copies
    ]
    x4 = x[None]
    from_data = key is None and any(copy.stochastic for copy in copies)
    if given_amax is None:
        amax, prints = amax_for_copies(x4, copies, fingerprint=from_data)
        amax = [bits if bits is None else share_amax(bits) for bits in amax]
    else:
        bits = jax.lax.bitcast_convert_type(given_amax, jnp.uint32)[None]
        amax, prints = [bits if copy.format.tensor_scaled else None for copy in copies], None
    seed = _data_seed(prints, x.shape) if prints is not None else None
    if key is not None:
        seed = key[None]
    made = iter(make_copies(x4, copies, amax, [seed] * len(copies)) if copies else [])
    described = iter(copies)
    result: list[Matrix] = []
    for operand, axis, _ in wanted:
        if operand is None:
            result.append(Plain(x.astype(jnp.bfloat16), axis))
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


def multiply_matrices(
    a: Matrix, b: Matrix, out_dtype: Any, wish: jax.NamedSharding | None = None
) -> jax.Array:
    """[B, M, N] of a [B, M, K] and b [B, N, K], each contracted along its own axis.

    On an explicit mesh it is sharded as ``wish`` says.
    """
    if isinstance(a, BlockScaledArray) and isinstance(b, BlockScaledArray):
        result = multiply(a, b, out_dtype, wish=wish)
    else:
        assert isinstance(a, Plain) and isinstance(b, Plain)
        factors = [x.factor for x in (a, b) if x.factor is not None]
        with jax.named_scope(f"decoded.{a.stored}.{b.stored}") if factors else nullcontext():
            result = sharding.multiply_plain(a.value, b.value, (a.axis, b.axis), wish)
        for factor in factors:
            result = result * factor[:, None, None]
    return sharding.like(result.astype(out_dtype), wish)


def decoded(q: BlockScaledArray, axis: str) -> Plain:
    """A stored weight [B, N, K] in bfloat16, contracted along ``axis``.

    Elements times block scales have at most six significant bits, so that bfloat16 holds them
    exactly, down to its smallest normal number; the tensor scale stays outside.
    """
    unscaled = dataclasses.replace(q, global_scale=jnp.ones_like(q.global_scale))
    value = decode(unscaled, jnp.dtype(jnp.bfloat16))
    return Plain(value, axis, q.global_scale, q.format.name)


# ---- The product with its gradients --------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Primal:
    """What a gradient has to look like."""

    dtype: Any
    sharding: jax.NamedSharding | None

    @classmethod
    def of(cls, x: jax.Array | None) -> Primal | None:
        """That of the gradient of x."""
        return None if x is None else cls(x.dtype, sharding.sharding_of(x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """A right operand that was quantized before, instead of by the product."""

    forward: BlockScaledArray  # [B, N, K]
    backward: BlockScaledArray | None  # [B, K, N]; None: the recipe's dgrad is in bfloat16
    input_amax: jax.Array | None = None  # f32 [B], static, of the left operand


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def product(
    lhs: jax.Array,
    rhs: jax.Array | None,
    prepared: Prepared | None,
    key: jax.Array | None,
    spec: Product,
) -> jax.Array:
    """lhs . rhs with the gradients that the recipe asks for.

    Args:
        lhs: float32, bfloat16 or float16 [B, M, K] or [B, K, M], as ``spec.lhs`` says.
        rhs: float32, bfloat16 or float16 [B, N, K] or [B, K, N], as ``spec.rhs`` says. None beside
            ``prepared``: no gradient is asked for.
        prepared: quantized copies of rhs, which then only receives its gradient.
        key: uint32[2] for the stochastic copies of the cotangent; None takes its fingerprint.
        spec: the static rest.

    Returns:
        ``spec.out_dtype`` [B, M, N].
    """
    with jax.named_scope("fprop"):
        if prepared is not None:
            return _stored_product(lhs, prepared, spec)
        (a,) = matrices(lhs, [(spec.lhs.forward, spec.lhs.contract_axis, 0)])
        assert rhs is not None
        (b,) = matrices(rhs, [(spec.rhs.forward, spec.rhs.contract_axis, 0)])
        return multiply_matrices(a, b, spec.out_dtype, spec.out_sharding)


def _stored_product(lhs: jax.Array, weight: Prepared, spec: Product) -> jax.Array:
    """lhs times a weight that is quantized already; decoded where lhs stays in bfloat16."""
    forward, static = spec.lhs.forward, weight.input_amax
    if forward is None or not forward.format.tensor_scaled:
        static = None  # such formats have no tensor scale
    with nullcontext() if static is None else jax.named_scope("static_amax"):
        (a,) = matrices(lhs, [(forward, spec.lhs.contract_axis, 0)], given_amax=static)
        b = decoded(weight.forward, "cols") if forward is None else weight.forward
        return multiply_matrices(a, b, spec.out_dtype, spec.out_sharding)


def _stored_for_dgrad(weight: Prepared, spec: Product) -> BlockScaledArray:
    """What the gradient of lhs is made from; the forward copy is decoded in the backward pass."""
    if weight.backward is None and spec.rhs.backward is not None:
        raise TypeError(
            "jax_fp4: a product with this quantized right operand has no gradient, since there is "
            "no copy along the other axis; use quantize_weight, or a recipe whose dgrad is not "
            "quantized"
        )
    return weight.forward if weight.backward is None else weight.backward


def save(residuals: Any) -> Any:
    """Quantized residuals under the name that remat policies know."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL_NAME), residuals)


def _both(x: jax.Array, side: Side) -> list[Matrix]:
    """An operand for the forward product and for the other operand's gradient."""
    return matrices(x, [(side.forward, side.contract_axis, 0), (side.backward, side.free_axis, 0)])


def _product_fwd(
    lhs: jax.Array,
    rhs: jax.Array | None,
    prepared: Prepared | None,
    key: jax.Array | None,
    spec: Product,
) -> tuple[jax.Array, Any]:
    with jax.named_scope("fprop"):
        if rhs is None:  # a weight for inference: its own gradient is not asked for
            assert prepared is not None
            lhs_saved, y = None, _stored_product(lhs, prepared, spec)
            rhs_saved = _stored_for_dgrad(prepared, spec)
        else:
            a, lhs_saved = _both(lhs, spec.lhs)
            if prepared is None:
                b, rhs_saved = _both(rhs, spec.rhs)
            else:
                b, rhs_saved = prepared.forward, prepared.backward
                if rhs_saved is None:
                    rhs_saved = Plain(rhs.astype(jnp.bfloat16), spec.rhs.free_axis)
            y = multiply_matrices(a, b, spec.out_dtype, spec.out_sharding)
    return y, (*save((lhs_saved, rhs_saved)), key, Primal.of(lhs), Primal.of(rhs))


def _gradient(a: Matrix, b: Matrix, primal: Primal) -> jax.Array:
    return multiply_matrices(a, b, primal.dtype, primal.sharding)


def _product_bwd(spec: Product, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    lhs_saved, rhs_saved, key, lhs, rhs = residuals
    # dy is [B, M, N]: the gradient of lhs contracts N ("cols"), that of rhs contracts M ("rows").
    wanted = [(spec.lhs.cotangent, "cols", spec.lhs.stream)]
    if rhs is not None:
        wanted.append((spec.rhs.cotangent, "rows", spec.rhs.stream))
    for_lhs, *for_rhs = matrices(dy, wanted, key)
    if isinstance(for_lhs, Plain) and isinstance(rhs_saved, BlockScaledArray):
        rhs_saved = decoded(rhs_saved, "rows")
    # Each gradient comes out in the orientation of its primal.
    with jax.named_scope(spec.lhs.gradient):
        if spec.lhs.contract_axis == "cols":
            dlhs = _gradient(for_lhs, rhs_saved, lhs)  # [B, M, K]
        else:
            dlhs = _gradient(rhs_saved, for_lhs, lhs)  # [B, K, M]
    drhs = None
    if rhs is not None:
        with jax.named_scope(spec.rhs.gradient):
            if spec.rhs.contract_axis == "cols":
                drhs = _gradient(for_rhs[0], lhs_saved, rhs)  # [B, N, K]
            else:
                drhs = _gradient(lhs_saved, for_rhs[0], rhs)  # [B, K, N]
    return dlhs, drhs, None, None  # codes, scales and keys have no gradients


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
        return Side(axis, recipe.fprop_x, recipe.wgrad_x, recipe.dgrad_dy, DGRAD_STREAM)

    def w_side(axis: str) -> Side:
        return Side(axis, fprop_w, dgrad_w, recipe.wgrad_dy, WGRAD_STREAM)

    if recipe.weight == "lhs":
        return w_side(lhs_axis), x_side(rhs_axis)
    return x_side(lhs_axis), w_side(rhs_axis)
