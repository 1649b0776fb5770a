"""quantize, quantize_both and dequantize, and the primitives under them.

The primitives work on x[V, L, R, C]: V examples of a vmap, whose block numbers each start at 0, L
leading dimensions with an amax each and running block numbers, R x C matrices. Batching merges the
new axis into V, so that a vmap equals a Python loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _check, _compat, _native
from jax_fp4.block_array import BlockScaledArray, check_array, operand_attribute
from jax_fp4.formats import HADAMARD_SIZE, NVFP4, Format

DEFAULT_SIGNS = 0b1101_0111_1110_1000
"""Transformer Engine's Hadamard signs; bit i is set where element i is negated."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """How one quantized copy of a matrix is made.

    Attributes:
        axis: "cols": blocks along the last axis. "rows": along the rows; the copy is transposed.
        signs: bit mask of the Hadamard transform's signs, or None for no transform.
        layout: of the scales, "linear" or "tiled".
        others: as in `quantize`.
    """

    format: Format
    axis: str = "cols"
    scaling: str = "1d"
    rounding: str = "nearest"
    signs: int | None = None
    scale_rule: str = "rceil"
    four_over_six: bool = False
    stream: int = 0
    layout: str = "linear"

    @property
    def stochastic(self) -> bool:
        """Whether the copy needs a seed."""
        return self.rounding == "stochastic"

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """(rows, length) of the copy; the transform rounds the length up to whole groups."""
        copy_rows, length = (rows, cols) if self.axis == "cols" else (cols, rows)
        if self.signs is not None:
            length = -(-length // HADAMARD_SIZE) * HADAMARD_SIZE
        return copy_rows, length

    def attribute(self) -> str:
        """The custom call's attribute (csrc/ffi/attributes.h)."""
        return (
            f"axis={self.axis} {self.format.attribute()} rule={self.scale_rule} "
            f"tiles={int(self.scaling == '2d')} stochastic={int(self.stochastic)} "
            f"four_over_six={int(self.four_over_six)} hadamard={int(self.signs is not None)} "
            f"signs={self.signs or 0} stream={self.stream} layout={self.layout}"
        )


# ---- Primitives ----------------------------------------------------------------------------------


def _merge_batch(args: Sequence[Any], dims: Sequence[int | None]) -> tuple[list[Any], int]:
    """Moves every operand's batch axis to the front and merges it with its leading axis V."""
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    merged = []
    for arg, dim in zip(args, dims, strict=True):
        front = (
            jnp.broadcast_to(arg[None], (size, *arg.shape))
            if dim is None
            else jnp.moveaxis(arg, dim, 0)
        )
        merged.append(front.reshape(size * front.shape[1], *front.shape[2:]))
    return merged, size


def _split_batch(results: Sequence[Any], size: int) -> tuple[list[Any], list[int]]:
    split = [r.reshape(size, r.shape[0] // size, *r.shape[1:]) for r in results]
    return split, [0] * len(split)


def _amax_abstract(x: Any, origin: Any, *, rotate: bool, fingerprint: bool, **_: Any) -> list[Any]:
    shapes = [x.shape[:2]] * (1 + rotate) + [x.shape[:1]] * fingerprint
    return [_compat.result_aval(shape, np.uint32, (x, origin)) for shape in shapes]


def _amax_batch(args: Any, dims: Any, **params: Any) -> Any:
    merged, size = _merge_batch(args, dims)
    return _split_batch(_amax_p.bind(*merged, **params), size)


_amax_p = _native.make_primitive(
    "jax_fp4_amax",
    _amax_abstract,
    _amax_batch,
    ("rotate", "axis", "signs", "fingerprint", "logical_rows", "logical_cols"),
    "Take the amax under jax.lax.stop_gradient.",
)


def _quantize_abstract(x: Any, origin: Any, *operands: Any, copies: Any, **_: Any) -> list[Any]:
    examples, leads, rows, cols = x.shape
    results = []
    for copy in copies:
        copy_rows, length = copy.shape(rows, cols)
        for shape, dtype in (
            ((copy_rows, copy.format.row_bytes(length)), np.uint8),
            (copy.format.scale_shape(copy.layout, copy_rows, length), np.uint8),
            ((), np.float32),
        ):
            results.append(
                _compat.result_aval((examples, leads, *shape), dtype, (x, origin, *operands))
            )
    return results


def _quantize_batch(args: Any, dims: Any, **params: Any) -> Any:
    merged, size = _merge_batch(args, dims)
    return _split_batch(_quantize_p.bind(*merged, **params), size)


def _quantize_attributes(*, copies: tuple[Copy, ...], **rest: Any) -> dict[str, Any]:
    texts = [copy.attribute() for copy in copies] + [""]
    return {"first": texts[0], "second": texts[1], **rest}


_quantize_p = _native.make_primitive(
    "jax_fp4_quantize",
    _quantize_abstract,
    _quantize_batch,
    ("copies", "logical_rows", "logical_cols"),
    "Use jax_fp4.dot, whose gradients are defined, or jax.lax.stop_gradient.",
    attributes=_quantize_attributes,
)


def _dequantize_abstract(
    values: Any, scales: Any, global_scale: Any, *, k: int, dtype: str, **_: Any
) -> list[Any]:
    shape = (*values.shape[:2], k)
    return [_compat.result_aval(shape, jnp.dtype(dtype), (values, scales, global_scale))]


def _dequantize_batch(args: Any, dims: Any, **params: Any) -> Any:
    merged, size = _merge_batch(args, dims)
    return _split_batch(_dequantize_p.bind(*merged, **params), size)


_dequantize_p = _native.make_primitive(
    "jax_fp4_dequantize",
    _dequantize_abstract,
    _dequantize_batch,
    ("operand", "k", "dtype"),
    "Its gradient with respect to the scales is not defined; use jax.lax.stop_gradient.",
    attributes=lambda operand, k, dtype: {"operand": operand, "k": k},
)


# ---- What dot and the public functions share -----------------------------------------------------


def _origin(examples: int) -> jax.Array:
    return jnp.zeros((examples, 3), jnp.uint32)


def amax_for_copies(
    x: jax.Array, copies: Sequence[Copy], *, fingerprint: bool = False
) -> tuple[list[jax.Array | None], jax.Array | None]:
    """The amax that each copy of x [V, L, R, C] needs, in as few passes as possible (mostly one).

    Amax values travel as the bits of an f32 >= 0: XLA flushes subnormals in max and pmax, and such
    bits compare like the floats.

    Args:
        x: float32, bfloat16 or float16 [V, L, R, C].
        copies: how the copies will be made. A rotated copy needs the amax after its transform.
        fingerprint: also ``sum over elements of bits * (2 * logical index + 1) mod 2**32``.

    Returns:
        (for each copy uint32 [V, L], or None where its format needs none; uint32 [V] or None).
    """
    rotations = {
        (c.axis, c.signs) for c in copies if c.format.tensor_scaled and c.signs is not None
    }
    plain_needed = any(c.format.tensor_scaled and c.signs is None for c in copies)
    found: dict[tuple[str, int | None], jax.Array] = {}
    prints = None
    passes: list[tuple[str, int | None]] = sorted(rotations)
    if not passes and (plain_needed or fingerprint):
        passes = [("cols", None)]
    for index, (axis, signs) in enumerate(passes):
        results = _amax_p.bind(
            x,
            _origin(x.shape[0]),
            rotate=signs is not None,
            axis=f"axis={axis}",
            signs=signs or 0,
            fingerprint=fingerprint and index == 0,
            logical_rows=x.shape[2],
            logical_cols=x.shape[3],
        )
        found["", None] = results[0]
        if signs is not None:
            found[axis, signs] = results[1]
        if fingerprint and index == 0:
            prints = results[-1]
    amax = [
        None
        if not c.format.tensor_scaled
        else found["", None]
        if c.signs is None
        else found[c.axis, c.signs]
        for c in copies
    ]
    return amax, prints


def make_copies(
    x: jax.Array,
    copies: Sequence[Copy],
    amax: Sequence[jax.Array | None],
    seeds: Sequence[jax.Array | None],
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """One pass over x [V, L, R, C] that makes one copy, or two along different axes.

    Args:
        x: float32, bfloat16 or float16 [V, L, R, C].
        copies: how each copy is made.
        amax: uint32 [V, L] for each copy in a tensor-scaled format.
        seeds: uint32 [V, 2] for each stochastic copy.

    Returns:
        (values, scales, global_scale) of each copy, with leading [V, L].
    """
    operands: list[jax.Array] = [x, _origin(x.shape[0])]
    for copy, bits, seed in zip(copies, amax, seeds, strict=True):
        if copy.format.tensor_scaled:
            assert bits is not None
            operands.append(bits)
        if copy.stochastic:
            assert seed is not None
            operands.append(seed)
    results = _quantize_p.bind(
        *operands, copies=tuple(copies), logical_rows=x.shape[2], logical_cols=x.shape[3]
    )
    return [tuple(results[3 * i : 3 * i + 3]) for i in range(len(copies))]


# ---- Public functions ----------------------------------------------------------------------------

_COPY_OPTIONS = ("scaling", "rounding", "stream", "hadamard", "scale_rule", "four_over_six", "amax")


def _checked_copy(where: str, format: Any, axis: str, options: Mapping[str, Any]) -> Copy:
    _check.instance(where, "format", format, Format, "jax_fp4.NVFP4")
    _check.one_of(where, "scaling", options["scaling"], ("1d", "2d"))
    _check.one_of(where, "rounding", options["rounding"], ("nearest", "stochastic"))
    _check.one_of(where, "scale_rule", options["scale_rule"], ("rceil", "floor"))
    _check.one_of(where, "four_over_six", options["four_over_six"], (True, False))
    copy = Copy(
        format=format,
        axis=axis,
        scaling=options["scaling"],
        rounding=options["rounding"],
        signs=_check.signs(where, "hadamard", options["hadamard"], DEFAULT_SIGNS),
        scale_rule=options["scale_rule"],
        four_over_six=options["four_over_six"],
        stream=_check.stream(where, options["stream"]),
    )
    if copy.scaling == "2d" and (copy.signs is not None or format.scale == "unit"):
        what = (
            "hadamard=True"
            if copy.signs is not None
            else f"format {format}, which has no block scales"
        )
        _check.fail(where, "scaling", f'"1d" with {what}', '"2d"', "drop one of the two")
    if copy.four_over_six and (format.scale != "ue4m3" or copy.stochastic):
        got = f"{format} with rounding={copy.rounding!r}"
        _check.fail(
            where,
            "four_over_six",
            "False but for NVFP4 rounded to nearest",
            f"True for {got}",
            "drop four_over_six",
        )
    if copy.scale_rule == "floor" and format.scale != "ue8m0":
        _check.fail(
            where,
            "scale_rule",
            f'"rceil" (the default, not used) for {format}',
            '"floor"',
            "the rule is a choice of MX formats only",
        )
    return copy


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
    value = jnp.asarray(given)
    if value.dtype != jnp.float32 or value.shape not in ((), lead):
        _check.fail(
            where,
            "amax",
            f"float32 of shape () or {lead}",
            f"{value.dtype}{value.shape}",
            "pass one amax, or one for each leading index",
        )
    bits = jax.lax.bitcast_convert_type(jnp.broadcast_to(value, lead), jnp.uint32)
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
    x4 = x.reshape(1, math.prod(lead), rows, cols)
    copies = [copy for copy, _, _ in wanted]
    amax = [_given_amax(where, copy, given, lead) for copy, _, given in wanted]
    missing = [i for i, bits in enumerate(amax) if bits is None]
    measured, _ = amax_for_copies(x4, [copies[i] for i in missing])
    for i, bits in zip(missing, measured, strict=True):
        amax[i] = bits if bits is None or amax_axes is None else jax.lax.pmax(bits, amax_axes)
    seed = None if words is None else words.reshape(1, 2)
    made = make_copies(x4, copies, amax, [seed] * len(copies))
    arrays = []
    for (copy, axis, _), (values, scales, global_scale), bits in zip(
        wanted, made, amax, strict=True
    ):
        arrays.append(
            BlockScaledArray(
                values=values.reshape(*lead, *values.shape[2:]),
                scales=scales.reshape(*lead, *scales.shape[2:]),
                global_scale=global_scale.reshape(lead),
                amax=None
                if bits is None
                else jax.lax.bitcast_convert_type(bits.reshape(lead), jnp.float32),
                format=copy.format,
                axis=axis,
                layout=copy.layout,
                length=copy.shape(rows, cols)[1],
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
    lead, rows = q.values.shape[:-2], q.values.shape[-2]
    leads = math.prod(lead)
    (x,) = _dequantize_p.bind(
        q.values.reshape(leads, *q.values.shape[len(lead) :]),
        q.scales.reshape(leads, *q.scales.shape[len(lead) :]),
        q.global_scale.reshape(leads),
        operand=operand_attribute(q),
        k=q.length,
        dtype=out.name,
    )
    x = x.reshape(*lead, rows, q.length)
    return x if q.axis == -1 else jnp.moveaxis(x, -1, q.axis)
