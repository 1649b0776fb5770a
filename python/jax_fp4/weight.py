"""Weights that are quantized once and used often: `QuantizedWeight`, and what makes one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _check
from jax_fp4.block_array import BlockScaledArray, check_array
from jax_fp4.product import Prepared, matrices
from jax_fp4.recipe import Recipe, resolve


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight(BlockScaledArray):
    """A weight matrix that `dot` takes as its right operand; a pytree.

    Its own values are the copy that the forward product takes.

    Attributes:
        backward: the copy for the gradient of the other operand, quantized along the other axis;
            None where the recipe has no quantized dgrad.
        master: the array that was quantized, which gradients flow to; None for inference.
        fingerprint: uint32 [], a hash of the bits of the master that was quantized; a master with
            another one is stale. None where there is no master.
        input_amax: float32 [], a static amax for the left operand of every product, where its
            format has a tensor scale; None: that of each left operand itself.
        recipe: what it was quantized for; None for what a checkpoint stores.
    """

    backward: BlockScaledArray | None = None
    master: jax.Array | None = None
    fingerprint: jax.Array | None = None
    input_amax: jax.Array | None = None
    recipe: Recipe | None = dataclasses.field(default=None, metadata={"static": True})

    # The master that needs no check, because this very object was made from it. No field: whatever
    # takes the pytree apart and builds it again may have changed the master, and loses this.
    _made_from = None

    def with_master(self, w: jax.Array) -> QuantizedWeight:
        """This weight with gradients that flow to ``w``.

        So that it can be quantized outside of the function that is differentiated::

            q = quantize_weight(w)
            jax.grad(lambda w: loss(dot(x, q.with_master(w))))(w)

        Args:
            w: what was quantized, bit for bit. Other bits are an error where they are known, and
                NaN in every product and gradient where they are traced.

        Returns:
            A QuantizedWeight.
        """
        w = _check.float_array("QuantizedWeight.with_master", "w", w)
        if self.fingerprint is None or self.master is None:
            _check.fail(
                "QuantizedWeight.with_master",
                "self",
                "quantized with trainable=True",
                "a weight for inference",
                "quantize it again",
            )
        return _verified(dataclasses.replace(self, master=w))


def quantize_weight(
    w: jax.Array, recipe: Recipe | None = None, *, axis: int = -2, trainable: bool = True
) -> QuantizedWeight:
    """Quantizes a weight for many products, as `dot` would for each of them.

    ``dot(x, quantize_weight(w)) == dot(x, w)``, bit for bit, gradients included: those of ``w``
    flow through this function. The weight is then quantized once for all micro-batches of a step,
    or once for inference. After an update it has to be quantized again; products with copies that
    do not belong to the master are refused (see `QuantizedWeight.with_master`).

    Args:
        w: float32, bfloat16 or float16 [K, N], or [N, K] with ``axis=-1``. Use `jax.vmap` for
            stacked weights.
        recipe: its ``fprop_w`` and ``dgrad_w`` are used; by default that of `use_recipe`.
        axis: the axis that the forward product contracts.
        trainable: False for inference: the master is not kept, and gets no gradient.

    Returns:
        A `BlockScaledArray` that `dot`, `matmul`, `dot_general`, `tensordot`, `inner` and `einsum`
        take as the right operand.

    Raises:
        TypeError: w is no float array.
        ValueError: w is no matrix, or the recipe quantizes no weight.
    """
    where = "quantize_weight"
    recipe = resolve(where, recipe)
    w = _check.float_array(where, "w", w, min_rank=2)
    axis = _check.axis(where, axis, w.ndim)
    if w.ndim != 2:
        _check.fail(where, "w", "a matrix", f"shape {w.shape}", "use jax.vmap for stacked weights")
    if recipe.fprop_w is None or recipe.weight == "lhs":
        _check.fail(
            where,
            "recipe",
            "one that quantizes the right operand of the forward product as a weight",
            repr(recipe.name),
            "pass the weight itself",
        )
    along, across = ("cols", "rows") if axis == -1 else ("rows", "cols")
    wanted = [(recipe.fprop_w, along, 0)]
    if recipe.dgrad_w is not None:
        wanted.append((recipe.dgrad_w, across, 0))
    source = jax.lax.stop_gradient(w)
    copies = matrices(source[None], wanted, layout="linear")
    forward, *backward = (jax.tree.map(lambda leaf: leaf[0], copy) for copy in copies)
    assert isinstance(forward, BlockScaledArray)
    q = QuantizedWeight(
        **_parts(forward),
        backward=backward[0] if backward else None,
        master=w if trainable else None,
        fingerprint=_fingerprint(source) if trainable else None,
        recipe=recipe,
    )
    object.__setattr__(q, "_made_from", q.master)
    return q


def stored_weight(q: BlockScaledArray, *, input_amax: Any = None) -> QuantizedWeight:
    """A weight as a checkpoint stores it, with the static amax of its layer's input.

    ``dot(x, stored_weight(q, input_amax=a), recipe=r)`` quantizes x as
    ``quantize(x, NVFP4, amax=a)`` does: the amax of x is not taken, magnitudes above a saturate,
    and a row of the result depends on no other row of x. Without ``input_amax``, and where r takes
    x in an MX format or in bfloat16, it is ``dot(x, q, recipe=r)``.

    Args:
        q: what `quantize` or `checkpoint.load` returned: a matrix, or stacked ones for scan.
        input_amax: float32, positive and finite, one for each matrix; see
            `checkpoint.activation_amax`.

    Returns:
        What `dot` and its relatives take as the right operand, under every recipe that fits.

    Raises:
        ValueError: ``input_amax`` is not positive and finite, or of another shape.
    """
    where = "stored_weight"
    q = check_array(where, "q", q)
    lead = q.values.shape[:-2]
    amax = None if input_amax is None else jnp.asarray(input_amax, jnp.float32)
    if amax is not None:
        known = _known(jnp.all((amax > 0) & jnp.isfinite(amax)))
        if amax.shape != lead or known is False:
            got = f"shape {amax.shape}" if amax.shape != lead else str(amax)
            expected = f"positive, finite and of shape {lead}"
            _check.fail(where, "input_amax", expected, got, "measure it on calibration data")
    return QuantizedWeight(**_parts(q), input_amax=amax)


def _parts(q: BlockScaledArray) -> dict[str, Any]:
    return {f.name: getattr(q, f.name) for f in dataclasses.fields(BlockScaledArray)}


def prepared(where: str, q: BlockScaledArray, recipe: Recipe) -> tuple[jax.Array | None, Prepared]:
    """(master [1, ...] or None, copies) of a quantized right operand, for `product`.

    Args:
        where: the function that users called.
        q: a matrix that was checked by itself.
        recipe: the recipe in force.
    """
    argument = "rhs"
    static = q.input_amax if isinstance(q, QuantizedWeight) else None
    if isinstance(q, QuantizedWeight) and (q.master is not None or q.recipe == recipe):
        if q.recipe != recipe:
            _check.fail(
                where,
                argument,
                f"quantized for the recipe in force, {recipe.name!r}",
                f"a weight for {None if q.recipe is None else q.recipe.name!r}",
                "pass the same recipe to quantize_weight",
            )
        q = _verified(q)
        master, backward = q.master, q.backward
    else:
        _check_fits(where, argument, q, recipe)
        master, backward = None, None
    lift = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)  # noqa: E731
    plain = BlockScaledArray(**_parts(q))
    return lift(master), Prepared(lift(plain), lift(backward), lift(static))


def _check_fits(where: str, argument: str, q: BlockScaledArray, recipe: Recipe) -> None:
    """What is stored goes with the recipe's other operand; beside bfloat16 it is decoded."""
    other = recipe.fprop_x
    if recipe.weight == "lhs":
        _check.fail(
            where,
            argument,
            "an array under a recipe that does not quantize it as a weight",
            f"{q.format} under {recipe.name!r}",
            "pass another recipe",
        )
    block, signs = (q.format.block, None) if other is None else (other.format.block, other.signs)
    if block != q.format.block or signs != q.signs:
        _check.fail(
            where,
            argument,
            f"quantized in blocks of {block} and {'not ' if signs is None else ''}rotated, as "
            f"fprop_x of {recipe.name!r} is",
            f"{q.format} in blocks of {q.format.block}, {'not ' if q.signs is None else ''}rotated",
            "use a recipe that fits it, recipes.BF16, which decodes it, or quantize_weight",
        )


# ---- Stale copies --------------------------------------------------------------------------------


def _fingerprint(w: jax.Array) -> jax.Array:
    """A hash of the bits of ``w`` and their places: uint32 [].

    A wrapping sum, so that the order does not matter and shards can be summed, of words that are
    mixed first: a plain sum of bits would not see signs flipped in pairs, or a scaling by 2.
    """

    def mix(h: jax.Array) -> jax.Array:  # the finalizer of MurmurHash3: a bijection of 32 bits
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EB_CA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2_AE35)
        return h ^ (h >> 16)

    kind = jnp.uint32 if w.dtype.itemsize == 4 else jnp.uint16
    bits = jax.lax.bitcast_convert_type(w, kind).astype(jnp.uint32)
    place = jnp.uint32(0)
    for axis in range(w.ndim):
        place = mix(place + jax.lax.broadcasted_iota(jnp.uint32, w.shape, axis))
    return mix(bits ^ place).sum(dtype=jnp.uint32)


def _verified(q: QuantizedWeight) -> QuantizedWeight:
    """``q`` if its copies belong to its master; otherwise an error, or NaN where it is traced."""
    if q.master is None or q._made_from is q.master:
        return q
    where = "QuantizedWeight"
    if q.master.shape != q.shape or q.master.dtype != q.dtype:
        _check.fail(
            where,
            "master",
            f"{q.dtype.name} of shape {q.shape}, as it was quantized",
            f"{q.master.dtype.name} of shape {q.master.shape}",
            "quantize it again",
        )
    fresh = _fingerprint(jax.lax.stop_gradient(q.master)) == q.fingerprint
    known = _known(fresh)
    if known is False:
        _check.fail(
            where,
            "master",
            "what was quantized, bit for bit",
            "another array: the quantized copies are stale",
            "call quantize_weight again after every update",
        )
    if known is None:  # with a NaN as the scale, so are the products of every format

        def spoil(scale: jax.Array) -> jax.Array:
            return jnp.where(fresh, scale, jnp.nan)

        backward = q.backward
        if backward is not None:
            backward = dataclasses.replace(backward, global_scale=spoil(backward.global_scale))
        q = dataclasses.replace(q, global_scale=spoil(q.global_scale), backward=backward)
    object.__setattr__(q, "_made_from", q.master)
    return q


def _known(value: Any) -> bool | None:
    """A truth value where it is known while tracing, or None."""
    try:
        return bool(value)
    except jax.errors.ConcretizationTypeError:
        return None
