"""How one quantized copy of a matrix is made, and the primitives under quantize and dot.

The primitives work on x[V, L, R, C]: V examples of a vmap, whose block numbers each start at 0, L
leading dimensions with an amax each and running block numbers, R x C matrices. Batching merges the
new axis into V, so that a vmap equals a Python loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _compat, _native, sharding
from jax_fp4.block_array import BlockScaledArray, operand_attribute, operand_dims
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

    def step(self, axis: str) -> int:
        """Elements of the shortest part of the rows or columns that a device can have alone."""
        if axis != self.axis:
            return math.lcm(
                128 if self.layout == "tiled" else 1,
                self.format.block if self.scaling == "2d" else 1,
            )
        tile = 4 * self.format.block if self.layout == "tiled" else 1
        return math.lcm(tile, self.format.whole_elements)

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
        merged = [sharding.reshape(x, (size * examples, *x.shape[2:])) for x in fronts]
        results = sharding.bind(primitive(), *merged, **params)
        split = [sharding.reshape(x, (size, examples, *x.shape[1:])) for x in results]
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


# ---- Shards --------------------------------------------------------------------------------------


def _x_sizes(shape: Sequence[int], row_step: int, col_step: int) -> dict[str, int]:
    """Factors of x: v, l, r and c, for its four dimensions."""
    v, l, r, c = shape  # noqa: E741
    return {"v": v, "l": l, "r": sharding.steps(r, row_step), "c": sharding.steps(c, col_step)}


def _shifted(origin: jax.Array, x: jax.Array, placement: sharding.Placement) -> jax.Array:
    """The origin of this device's shard of x."""
    offset = [placement.index(f) * n for f, n in zip("lrc", x.shape[1:], strict=True)]
    return origin + jnp.stack([jnp.asarray(n, jnp.uint32) for n in offset])


def _amax_rule(
    x: Sequence[int], origin: Sequence[int], *, rotate: bool, axis: str, fingerprint: bool, **_: Any
) -> sharding.Rule:
    by = [HADAMARD_SIZE if rotate and axis == f"axis={name}" else 1 for name in ("rows", "cols")]
    sizes = _x_sizes(x, *by)
    v, l, r, c = zip("vlrc", (1, 1, *by), strict=True)  # noqa: E741

    def local(call: Any, shards: Any, placement: sharding.Placement) -> list[jax.Array]:
        x, origin = shards
        results = list(call(x, _shifted(origin, x, placement)))
        inside, all_axes = placement.axes("rc"), placement.axes("lrc")
        if inside:
            results[: 1 + rotate] = (jax.lax.pmax(a, inside) for a in results[: 1 + rotate])
        if fingerprint and all_axes:
            results[-1] = jax.lax.psum(results[-1], all_axes)
        return results

    return sharding.Rule(
        sizes=sizes,
        operands=((v, l, r, c), (v, None)),
        results=((v, l),) * (1 + rotate) + ((v,),) * fingerprint,
        leading=(0,),
        order="vlrc",
        local=local,
    )


def _quantize_rule(*shapes: Sequence[int], copies: tuple[Copy, ...], **_: Any) -> sharding.Rule:
    by = {axis: math.lcm(*(copy.step(axis) for copy in copies)) for axis in ("rows", "cols")}
    sizes = _x_sizes(shapes[0], by["rows"], by["cols"])
    v, l = ("v", 1), ("l", 1)  # noqa: E741
    operands: list[sharding.Dims] = [
        (v, l, ("r", by["rows"]), ("c", by["cols"])),
        (v, None),
    ]
    results: list[sharding.Dims] = []
    for copy in copies:
        operands += [(v, l)] * copy.format.tensor_scaled + [(v, None)] * copy.stochastic
        across, along = ("rows", "cols") if copy.axis == "cols" else ("cols", "rows")
        one, length = by[across], by[along]
        row_bytes = copy.format.row_bytes(length)
        scale_rows, scale_cols, *inner = copy.format.scale_shape(copy.layout, one, length)
        rows, cols = across[0], along[0]  # the factors "r" and "c"
        results += [
            (v, l, (rows, one), (cols, row_bytes)),
            (v, l, (rows, scale_rows), (cols, scale_cols), *(None for _ in inner)),
            (v, l),
        ]

    def local(call: Any, shards: Any, placement: sharding.Placement) -> list[jax.Array]:
        x, origin, *rest = shards
        return list(call(x, _shifted(origin, x, placement), *rest))

    return sharding.Rule(
        sizes=sizes,
        operands=tuple(operands),
        results=tuple(results),
        leading=(0,),
        order="vlrc",
        local=local,
    )


def _dequantize_rule(
    values: Sequence[int], *_: Sequence[int], operand: str, k: int, **params: Any
) -> sharding.Rule:
    sizes, dims = operand_dims(values[0], k, [("r", operand, values)])
    result = (("b", 1), ("r", values[1] // sizes["r"]), ("k", k // sizes["k"]))

    def local(call: Any, shards: Any, placement: sharding.Placement) -> list[jax.Array]:
        return list(call(*shards, k=k // placement.count("k")))

    return sharding.Rule(
        sizes=sizes,
        operands=tuple(dims),
        results=(result,),
        leading=(0,),
        order="brk",
        local=local,
    )


for _primitive, _rule in (
    (_amax_p, _amax_rule),
    (_quantize_p, _quantize_rule),
    (_dequantize_p, _dequantize_rule),
):
    sharding.register(_primitive, _rule)


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
        results = sharding.bind(
            _amax_p,
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
    results = sharding.bind(
        _quantize_p,
        *operands,
        copies=tuple(copies),
        logical_rows=x.shape[2],
        logical_cols=x.shape[3],
    )
    return [tuple(results[3 * i : 3 * i + 3]) for i in range(len(copies))]


def decode(q: BlockScaledArray, dtype: np.dtype) -> jax.Array:
    """[L, R, length] of a quantized array whose leading dimensions are merged into L."""
    (x,) = sharding.bind(
        _dequantize_p,
        q.values,
        q.scales,
        q.global_scale,
        operand=operand_attribute(q),
        k=q.length,
        dtype=dtype.name,
    )
    return x
