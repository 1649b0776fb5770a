"""How one quantized copy of a matrix is made, and the primitives under quantize and dot.

The primitives work on x[V, L, R, C]: V examples of a vmap, whose block numbers each start at 0, L
leading dimensions with an amax each and running block numbers, R x C matrices. Batching merges the
new axis into V, so that a vmap equals a Python loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _compat, _native
from jax_fp4.block_array import BlockScaledArray, operand_attribute
from jax_fp4.formats import HADAMARD_SIZE, Format

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


def _batch_examples(primitive: Any) -> Any:
    """The batching rule of a primitive whose arrays all lead with an axis V: it merges into V."""

    def rule(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
        fronts = [
            jnp.broadcast_to(arg[None], (size, *arg.shape))
            if dim is None
            else jnp.moveaxis(arg, dim, 0)
            for arg, dim in zip(args, dims, strict=True)
        ]
        examples = fronts[0].shape[1]
        merged = [front.reshape(size * examples, *front.shape[2:]) for front in fronts]
        results = primitive().bind(*merged, **params)
        split = [result.reshape(size, examples, *result.shape[1:]) for result in results]
        return split, [0] * len(split)

    return rule


def _amax_abstract(x: Any, origin: Any, *, rotate: bool, fingerprint: bool, **_: Any) -> list[Any]:
    shapes = [x.shape[:2]] * (1 + rotate) + [x.shape[:1]] * fingerprint
    return [_compat.result_aval(shape, np.uint32, (x, origin)) for shape in shapes]


_amax_p = _native.make_primitive(
    "jax_fp4_amax",
    _amax_abstract,
    _batch_examples(lambda: _amax_p),
    ("rotate", "axis", "signs", "fingerprint", "logical_rows", "logical_cols"),
    "it is measured, not computed with; use jax.lax.stop_gradient.",
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


def _quantize_attributes(*, copies: tuple[Copy, ...], **rest: Any) -> dict[str, Any]:
    texts = [copy.attribute() for copy in copies] + [""]
    return {"first": texts[0], "second": texts[1], **rest}


_quantize_p = _native.make_primitive(
    "jax_fp4_quantize",
    _quantize_abstract,
    _batch_examples(lambda: _quantize_p),
    ("copies", "logical_rows", "logical_cols"),
    "its results are codes. Use jax_fp4.dot, which has gradients, or jax.lax.stop_gradient.",
    attributes=_quantize_attributes,
)


def _dequantize_abstract(
    values: Any, scales: Any, global_scale: Any, *, k: int, dtype: str, **_: Any
) -> list[Any]:
    shape = (*values.shape[:2], k)
    return [_compat.result_aval(shape, jnp.dtype(dtype), (values, scales, global_scale))]


_dequantize_p = _native.make_primitive(
    "jax_fp4_dequantize",
    _dequantize_abstract,
    _batch_examples(lambda: _dequantize_p),
    ("operand", "k", "dtype"),
    "it decodes codes and scales. Use jax.lax.stop_gradient.",
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


def decode(q: BlockScaledArray, dtype: np.dtype) -> jax.Array:
    """[L, R, length] of a quantized array whose leading dimensions are merged into L."""
    (x,) = _dequantize_p.bind(
        q.values,
        q.scales,
        q.global_scale,
        operand=operand_attribute(q),
        k=q.length,
        dtype=dtype.name,
    )
    return x
