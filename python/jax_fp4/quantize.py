"""quantize, quantize_both and dequantize: the public functions over copies.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _check, sharding
from jax_fp4.block_array import BlockScaledArray, check_array, flatten_lead
from jax_fp4.copies import DEFAULT_SIGNS, Copy, amax_for_copies, decode, make_copies
from jax_fp4.formats import NVFP4, Format

_COPY_OPTIONS = ("scaling", "rounding", "stream", "hadamard", "scale_rule", "four_over_six", "amax")


def _checked_copy(where: str, format: Any, axis: str, options: Mapping[str, Any]) -> Copy:
    _check.instance(where, "format", format, Format, "jax_fp4.NVFP4")
    signs = _check.signs(where, "hadamard", options["hadamard"], DEFAULT_SIGNS)
    _check.copy_options(
        where,
        format,
        scaling=options["scaling"],
        rounding=options["rounding"],
        rotated=signs is not None,
        scale_rule=options["scale_rule"],
        four_over_six=options["four_over_six"],
    )
    return Copy(
        format=format,
        axis=axis,
        scaling=options["scaling"],
        rounding=options["rounding"],
        signs=signs,
        scale_rule=options["scale_rule"],
        four_over_six=options["four_over_six"],
        stream=_check.stream(where, options["stream"]),
    )


def _given_amax(where: str, copy: Copy, given: Any, lead: tuple[int, ...]) -> jax.Array | None:
    """An amax that the caller gave, as bits uint32 [1, L]."""
    if given is None:
        return None
    if not copy.format.tensor_scaled:
        _check.fail(
            where,
            "amax",
            f"None for {copy.format}, which has no tensor scale",
            "a value",
            "drop it",
        )
    value = _check.amax_value(where, given, lead)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return bits.reshape(1, math.prod(lead))


def quantize(
    x: jax.Array,
    format: Format = NVFP4,
    *,
    axis: int = -1,
    scaling: str = "1d",
    rounding: str = "nearest",
    seed: jax.Array | None = None,
    key: jax.Array | None = None,
    stream: int = 0,
    hadamard: bool | Sequence[int] = False,
    scale_rule: str = "rceil",
    four_over_six: bool = False,
    amax: jax.Array | float | None = None,
    amax_axes: str | Sequence[str] | None = None,
) -> BlockScaledArray:
    """Quantizes ``x`` along ``axis``.

    ``dequantize(quantize(x)) ~ x``; the bytes are a pure function of the values, the options, the
    seed and the logical indices: the same on every machine, under jit, vmap, scan and remat, and
    for any number of threads. Leading dimensions (all but the last two once ``axis`` is moved last)
    have an amax each. docs/numerics.md has every formula.

    A block that holds NaN or Inf gets the NaN scale, so that its products are NaN; no other block
    changes.

    Args:
        x: float32, bfloat16 or float16, of rank 2 or more, any sizes.
        format: one of ``jax_fp4.formats.FORMATS``.
        axis: the axis that a product will contract; blocks run along it.
        scaling: "1d": one scale for each block of one row. "2d": one for each block x block tile,
            so that the copies along both axes hold the same numbers.
        rounding: "nearest" (ties to even) or "stochastic", which needs ``seed`` or ``key``.
        seed: uint32[2], low word first.
        key: a jax.random key, instead of ``seed``.
        stream: keeps two uses of one seed apart; a static int.
        hadamard: True, or 16 signs of 1 and -1: rotate groups of 16 along ``axis`` first. The
            length is then rounded up to a multiple of 16, since the transform mixes padding in.
        scale_rule: how MX scales are rounded, "rceil" (never saturates) or "floor" (OCP's text).
        four_over_six: NVFP4 only: for each block the better of mapping its maximum to 6 or to 4.
        amax: float32, the amax to use instead of the tensor's own (one, or one a leading index).
        amax_axes: inside shard_map, the mesh axes to reduce the amax over; none by default.

    Returns:
        A BlockScaledArray with linear scales.

    Raises:
        TypeError: x, seed, key or format is of a wrong type.
        ValueError: an option is unknown or does not go with another one.
    """
    where = "quantize"
    x = _check.float_array(where, "x", x, min_rank=2)
    axis = _check.axis(where, axis, x.ndim)
    options = {
        "scaling": scaling,
        "rounding": rounding,
        "stream": stream,
        "hadamard": hadamard,
        "scale_rule": scale_rule,
        "four_over_six": four_over_six,
    }
    if axis < -2:
        x4 = jnp.moveaxis(x, axis, -1)
        copy = _checked_copy(where, format, "cols", options)
    else:
        x4 = x
        copy = _checked_copy(where, format, "cols" if axis == -1 else "rows", options)
    words = _check.seed_words(where, seed=seed, key=key, needed=copy.stochastic)
    return _public_copies(where, x4, [(copy, axis, amax)], words, amax_axes, x.dtype)[0]


def quantize_both(
    x: jax.Array,
    format: Format = NVFP4,
    *,
    seed: jax.Array | None = None,
    key: jax.Array | None = None,
    amax_axes: str | Sequence[str] | None = None,
    row: Mapping[str, Any] | None = None,
    col: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[BlockScaledArray, BlockScaledArray]:
    """Both copies of ``x`` [..., R, C] that training needs, from one pass over it.

    ``quantize_both(x, f, **o) == (quantize(x, f, axis=-1, **o), quantize(x, f, axis=-2, **o))``,
    byte for byte.

    Args:
        x: float32, bfloat16 or float16 [..., R, C].
        format: the format of both copies.
        seed: uint32[2], for copies with stochastic rounding.
        key: a jax.random key, instead of ``seed``.
        amax_axes: as in `quantize`.
        row: options of the copy along the last axis only, for example ``dict(stream=1)``.
        col: options of the transposed copy only, for example ``dict(hadamard=True)``.
        **options: scaling, rounding, stream, hadamard, scale_rule, four_over_six and amax of both.

    Returns:
        (row copy with axis -1, column copy with axis -2).

    Raises:
        TypeError: an option is unknown, or a type is wrong.
        ValueError: as `quantize`.
    """
    where = "quantize_both"
    x = _check.float_array(where, "x", x, min_rank=2)
    defaults: dict[str, Any] = {
        "scaling": "1d",
        "rounding": "nearest",
        "stream": 0,
        "hadamard": False,
        "scale_rule": "rceil",
        "four_over_six": False,
        "amax": None,
    }
    wanted = []
    for name, axis, own in (("row", -1, row), ("col", -2, col)):
        if own is not None:
            _check.instance(where, name, own, Mapping, f"{name}=dict(hadamard=True)")
        merged = {**defaults, **options, **(own or {})}
        unknown = sorted(set(merged) - set(defaults))
        if unknown:
            _check.fail(
                where,
                unknown[0],
                f"an option of {', '.join(_COPY_OPTIONS)}",
                "an unknown name",
                f"check the spelling (options of both copies, or of `{name}`)",
                TypeError,
            )
        copy = _checked_copy(where, format, "cols" if axis == -1 else "rows", merged)
        wanted.append((copy, axis, merged["amax"]))
    needed = any(copy.stochastic for copy, _, _ in wanted)
    words = _check.seed_words(where, seed=seed, key=key, needed=needed)
    first, second = _public_copies(where, x, wanted, words, amax_axes, x.dtype)
    return first, second


def _public_copies(
    where: str,
    x: jax.Array,
    wanted: Sequence[tuple[Copy, int, Any]],
    words: jax.Array | None,
    amax_axes: Any,
    dtype: np.dtype,
) -> list[BlockScaledArray]:
    lead, (rows, cols) = x.shape[:-2], x.shape[-2:]
    x4 = sharding.reshape(x, (1, math.prod(lead), rows, cols))
    copies = [copy for copy, _, _ in wanted]
    axes = () if amax_axes is None else _check.axis_names(where, amax_axes)
    if axes and any(given is not None for _, _, given in wanted):
        _check.fail(
            where,
            "amax_axes",
            "None where amax is given",
            repr(amax_axes),
            "an amax that is given is taken as it is: reduce it first, with jax.lax.pmax",
        )
    amax = [_given_amax(where, copy, given, lead) for copy, _, given in wanted]
    missing = [i for i, bits in enumerate(amax) if bits is None]
    measured, _ = amax_for_copies(x4, [copies[i] for i in missing])
    for i, bits in zip(missing, measured, strict=True):
        amax[i] = bits if bits is None or not axes else jax.lax.pmax(bits, axes)
    seed = None if words is None else words.reshape(1, 2)
    made = make_copies(x4, copies, amax, [seed] * len(copies))
    arrays = []
    for (copy, axis, _), (values, scales, global_scale), bits in zip(
        wanted, made, amax, strict=True
    ):
        arrays.append(
            BlockScaledArray(
                values=sharding.reshape(values, (*lead, *values.shape[2:])),
                scales=sharding.reshape(scales, (*lead, *scales.shape[2:])),
                global_scale=sharding.reshape(global_scale, lead),
                amax=None
                if bits is None
                else jax.lax.bitcast_convert_type(sharding.reshape(bits, lead), jnp.float32),
                format=copy.format,
                axis=axis,
                layout=copy.layout,
                length=copy.shape(rows, cols)[1],
                signs=copy.signs,
                dtype=dtype,
            )
        )
    return arrays


def dequantize(q: BlockScaledArray, dtype: Any = None) -> jax.Array:
    """The values of a quantized array, in its logical shape.

    ``x = cvt((element(code) * scale(byte)) * global_scale)``, each step one rounding. A copy made
    with the Hadamard transform gives the rotated values.

    Args:
        q: what `quantize` returned.
        dtype: float32, bfloat16 or float16; by default the dtype of what was quantized.

    Returns:
        An array of shape ``q.shape``.
    """
    q = check_array("dequantize", "q", q)
    out = _check.float_dtype("dequantize", "dtype", q.dtype if dtype is None else dtype)
    x = sharding.reshape(decode(flatten_lead(q), out), (*q.values.shape[:-1], q.length))
    return x if q.axis == -1 else jnp.moveaxis(x, -1, q.axis)
