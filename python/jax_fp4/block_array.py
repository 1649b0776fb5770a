"""BlockScaledArray: a quantized array as a pytree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _check, sharding
from jax_fp4.formats import FORMATS, Format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockScaledArray:
    """An array in a block-scaled format, quantized along one axis.

    ``value[..., r, k] = element(code[..., r, k]) * scale(scales[..., r, k // block]) *
    global_scale[...]``, with ``code`` unpacked from ``values``. The quantized axis is stored last,
    whatever ``axis`` was. A pytree with uint8 leaves: it survives ``np.save``, checkpoints,
    collectives, ``vmap`` and ``scan``.

    Attributes:
        values: uint8 [..., R, format.row_bytes(length)], packed codes, even k in the low nibble
            (6-bit: four codes in three bytes, little-endian); rows padded with zero codes.
        scales: uint8, the UE4M3 or UE8M0 bytes: [..., R, ceil(length / block)] where the layout is
            "linear", [..., ceil(R/128), ceil(blocks/4), 32, 4, 4] where it is "tiled".
        global_scale: float32 [...], the per-tensor scale; 1 for MX formats.
        amax: float32 [...], the largest finite magnitude that global_scale was made from; None for
            MX formats, which need none.
        format: the block format.
        axis: the quantized axis of the logical array, counted from the end (-1 is the last).
        layout: "linear" or "tiled".
        length: logical elements along the quantized axis. With the Hadamard transform this is the
            original length rounded up to 16.
        dtype: dtype of the array that was quantized.
        signs: the signs of the Hadamard transform that was applied, bit i set where element i of a
            group was negated; None where the values are not rotated.
    """

    values: jax.Array
    scales: jax.Array
    global_scale: jax.Array
    amax: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    signs: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, the quantized axis where it was."""
        stored = (*self.values.shape[:-1], self.length)
        order = list(range(len(stored) - 1))
        order.insert(len(stored) + self.axis, len(stored) - 1)
        return tuple(stored[i] for i in order)

    @property
    def ndim(self) -> int:
        """The logical rank."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and global scales."""
        return sum(
            int(a.size) * a.dtype.itemsize for a in (self.values, self.scales, self.global_scale)
        )

    def codes(self) -> jax.Array:
        """The codes, one a byte: uint8 [..., R, length]."""
        values = self.values
        if self.format.bits == 4:
            unpacked = jnp.stack([values & 0xF, values >> 4], axis=-1)
        elif self.format.bits == 6:
            groups = values.reshape(*values.shape[:-1], -1, 3).astype(jnp.uint32)
            word = groups[..., 0] | groups[..., 1] << 8 | groups[..., 2] << 16
            unpacked = jnp.stack([(word >> (6 * i)) & 0x3F for i in range(4)], axis=-1)
            unpacked = unpacked.astype(jnp.uint8)
        else:
            unpacked = values[..., None]
        return unpacked.reshape(*values.shape[:-1], -1)[..., : self.length]

    def as_float4(self) -> jax.Array:
        """The codes as float4_e2m1fn [..., R, length], for interoperation; E2M1 formats only."""
        if self.format.bits != 4:
            _check.fail(
                "BlockScaledArray.as_float4",
                "format",
                "a 4-bit format",
                self.format.name,
                "use codes() for this one",
            )
        return jax.lax.bitcast_convert_type(self.values, jnp.float4_e2m1fn).reshape(
            *self.values.shape[:-1], -1
        )[..., : self.length]

    def linear_scales(self) -> jax.Array:
        """The scales in the linear layout: uint8 [..., R, ceil(length / block)]."""
        if self.layout == "linear":
            return self.scales
        rows, blocks = self.values.shape[-2], self.format.blocks(self.length)
        *lead, row_tiles, block_tiles, _, _, _ = self.scales.shape
        n = len(lead)
        # (row tile, block tile, row % 32, row / 32 % 4, block % 4) -> rows, blocks
        order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
        linear = self.scales.transpose(order).reshape(*lead, row_tiles * 128, block_tiles * 4)
        return linear[..., :rows, :blocks]


def operand_attribute(q: BlockScaledArray) -> str:
    """The custom calls' attribute for a quantized operand (csrc/ffi/attributes.h)."""
    return f"{q.format.attribute()} layout={q.layout}"


def operand_dims(
    batch: int, k: int, operands: Sequence[tuple[str, str, Sequence[int]]]
) -> tuple[dict[str, int], list[sharding.Dims]]:
    """How quantized operands of one custom call may be sharded: all are cut alike along K.

    Args:
        batch: of the call; an operand with another leading dimension is shared.
        k: elements of a row.
        operands: (factor of the rows, operand_attribute, shape of the values) of each.

    Returns:
        (steps of the factors "b", "k" and those of the rows; dimensions of values, scales and
        global scale of each operand).
    """
    described = []
    for factor, attribute, shape in operands:
        format = next(f for f in FORMATS if attribute.startswith(f.attribute() + " "))
        described.append((factor, format, attribute.split("layout=")[1], shape))
    k_step = math.lcm(
        *(f.whole_elements for _, f, _, _ in described),
        *(4 * f.block for _, f, layout, _ in described if layout == "tiled"),
    )
    sizes = {"b": batch, "k": sharding.steps(k, k_step)}
    dims: list[sharding.Dims] = []
    for factor, format, layout, (lead, rows, _) in described:
        row_step = 128 if layout == "tiled" else 1
        sizes[factor] = sharding.steps(rows, row_step)
        own = ("b", 1) if lead == batch else None
        scale_rows, scale_cols, *inner = format.scale_shape(layout, row_step, k_step)
        dims += [
            (
                own,
                (factor, row_step),
                ("k", format.row_bytes(k_step)),
            ),
            (
                own,
                (factor, scale_rows),
                ("k", scale_cols),
                *(None for _ in inner),
            ),
            (own,),
        ]
    return sizes, dims


def check_array(where: str, argument: str, q: Any) -> BlockScaledArray:
    """``q`` is a BlockScaledArray whose parts fit together."""
    _check.instance(where, argument, q, BlockScaledArray, "what jax_fp4.quantize returns")
    way_out = "use what jax_fp4.quantize returned, or build its parts as the docstring says"
    _check.instance(where, f"{argument}.format", q.format, Format, "jax_fp4.NVFP4")
    _check.one_of(where, f"{argument}.layout", q.layout, ("linear", "tiled"))
    arrays = ("values", "scales", "global_scale")
    for name in (*arrays, "length", "axis"):
        kind = jax.Array | np.ndarray if name in arrays else int
        if not isinstance(getattr(q, name), kind):
            _check.fail(
                where,
                f"{argument}.{name}",
                "an array" if name in arrays else "an int",
                repr(getattr(q, name))[:80],
                way_out,
                TypeError,
            )
    if q.values.ndim < 2 or not -q.values.ndim <= q.axis < 0:
        _check.fail(
            where,
            f"{argument}.axis",
            f"negative, for values of rank 2 or more (here {q.values.ndim})",
            str(q.axis),
            way_out,
        )
    for name, dtype in (("values", np.uint8), ("scales", np.uint8), ("global_scale", np.float32)):
        part = getattr(q, name)
        if part.dtype != dtype:
            _check.fail(
                where,
                f"{argument}.{name}",
                np.dtype(dtype).name,
                part.dtype.name,
                way_out,
                TypeError,
            )
    lead, rows = q.values.shape[:-2], q.values.shape[-2]
    expected = {
        "values": (*lead, rows, q.format.row_bytes(q.length)),
        "scales": (*lead, *q.format.scale_shape(q.layout, rows, q.length)),
        "global_scale": lead,
    }
    for name, shape in expected.items():
        if getattr(q, name).shape != shape:
            _check.fail(
                where,
                f"{argument}.{name}",
                f"of shape {shape} for {rows} rows of {q.length} elements in {q.format}",
                str(getattr(q, name).shape),
                way_out,
            )
    return q


def flatten_lead(q: BlockScaledArray) -> BlockScaledArray:
    """``q`` with its leading dimensions merged into one."""
    lead = q.values.shape[:-2]
    return BlockScaledArray(
        values=sharding.reshape(q.values, (math.prod(lead), *q.values.shape[len(lead) :])),
        scales=sharding.reshape(q.scales, (math.prod(lead), *q.scales.shape[len(lead) :])),
        global_scale=sharding.reshape(q.global_scale, (math.prod(lead),)),
        amax=None,
        format=q.format,
        axis=q.axis,
        layout=q.layout,
        length=q.length,
        signs=q.signs,
        dtype=q.dtype,
    )
