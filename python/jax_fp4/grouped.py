"""Products of groups whose sizes only the device knows, and the primitive under them.

Groups start at multiples of 128 rows or 128 elements of K, so that no block, no tile of scales and
no tile of the product holds parts of two. The primitive works on the examples of a vmap; an operand
that they share is there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _compat, _native, sharding
from jax_fp4.block_array import BlockScaledArray, operand_attribute, operand_dims

UNIT = 128
"""Groups start at multiples of it: the rows of a tensor core's tile, and whole blocks."""


def _abstract(
    *operands: Any, groups: int, grouping: str, examples: int, out_dtype: str, **_: Any
) -> list[Any]:
    rows, cols = operands[0].shape[1], operands[3].shape[1]
    shape = (examples if grouping == "rows" else examples * groups, rows, cols)
    return [_compat.result_aval(shape, jnp.dtype(out_dtype), operands)]


def _own(groups: int, grouping: str) -> tuple[int, ...]:
    """The leading size of each operand where examples share it."""
    b = groups if grouping == "rows" else 1
    return 1, 1, groups, b, b, groups, 1


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, examples: int, **params: Any) -> Any:
    """Merges a vmap's axis into the examples; an operand that has neither stays shared."""
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    own = _own(params["groups"], params["grouping"])

    def merge(arg: Any, dim: int | None, count: int) -> Any:
        arg = (
            jnp.broadcast_to(arg[None], (size, *arg.shape))
            if dim is None
            else jnp.moveaxis(arg, dim, 0)
        )
        lead, *rest = arg.shape[1:]
        if lead != examples * count:
            arg = jnp.broadcast_to(arg[:, None], (size, examples, count, *rest))
        return sharding.reshape(arg, (size * examples * count, *rest))

    merged: list[Any] = []
    for group in ((0, 1), (2,), (3, 4), (5,), (6,)):  # that have an example's axis or none
        shared = all(dims[i] is None and args[i].shape[0] == own[i] for i in group)
        merged += [args[i] if shared else merge(args[i], dims[i], own[i]) for i in group]
    (out,) = sharding.bind(_grouped_matmul_p, *merged, examples=size * examples, **params)
    return [sharding.reshape(out, (size, out.shape[0] // size, *out.shape[1:]))], [0]


def _workspace(
    *operands: Any, a: str, b: str, k: int, groups: int, grouping: str, out_dtype: str, **_: Any
) -> int:
    shape = (groups, operands[0].shape[1], operands[3].shape[1], k)
    batched = (False, grouping == "rows")
    return _native.gemm_workspace(a, b, shape, batched, out_dtype, grouping)


_grouped_matmul_p = _native.make_primitive(
    "jax_fp4_grouped_matmul",
    _abstract,
    _batch,
    ("a", "b", "k", "groups", "grouping", "examples", "out_dtype"),
    "its operands are codes. Use jax_fp4.ragged_dot, whose gradients are defined.",
    attributes=lambda examples, out_dtype, **rest: rest,
    workspace=_workspace,
)


def _rule(
    *shapes: Sequence[int],
    a: str,
    b: str,
    k: int,
    groups: int,
    grouping: str,
    examples: int,
    **_: Any,
) -> sharding.Rule:
    own = _own(groups, grouping)
    sizes, dims = operand_dims(1, k, [("m", a, shapes[0]), ("n", b, shapes[3])])
    # A device has whole groups: neither their rows nor their K are cut.
    whole = "km" if grouping == "rows" else "k"
    sizes = {"v": examples} | {f: 1 if f in whole else size for f, size in sizes.items()}
    operands = tuple(
        (("v", count) if shape[0] != count else None, *inner[1:])
        for shape, count, inner in zip(shapes, own, (*dims, (None, None)), strict=True)
    )
    rows, cols = shapes[0][1], shapes[3][1]
    each = 1 if grouping == "rows" else groups
    result = (("v", each), ("m", rows // sizes["m"]), ("n", cols // sizes["n"]))

    def local(call: Any, shards: Any, placement: sharding.Placement) -> list[jax.Array]:
        return list(call(*shards, examples=examples // placement.count("v")))

    return sharding.Rule(
        sizes=sizes,
        operands=operands,
        results=(result,),
        leading=(0, 3),
        order="vmnk",
        local=local,
    )


sharding.register(_grouped_matmul_p, _rule)


def multiply_groups(
    a: BlockScaledArray,
    b: BlockScaledArray,
    scales: tuple[jax.Array, jax.Array],
    groups: jax.Array,
    grouping: str,
    out_dtype: Any,
) -> jax.Array:
    """The product of every group; nothing is checked.

    ``grouping="rows"``: D [1, M, N] of a [1, M, K] and b [G, N, K]. Each 128 rows are multiplied
    with the matrix of ``groups`` uint32 [M / 128]; where it is G or more, D is not written.

    ``grouping="k"``: D [G, M, N] of a [1, M, K] and b [1, N, K], group g over K from ``groups``
    uint32 [G + 1] at g to that at g + 1, multiples of 128. The sum over nothing is 0.

    Args:
        a: its global scale is not used.
        b: its global scale is not used.
        scales: float32 [G] each, the global scales of a's and b's groups.
        groups: of which group the rows are, or where groups of K start. Whatever it holds, nothing
            outside of the operands is read or written.
        grouping: "rows" or "k".
        out_dtype: float32, bfloat16 or float16.
    """
    (out,) = sharding.bind(
        _grouped_matmul_p,
        *(a.values, a.scales, scales[0], b.values, b.scales, scales[1], groups[None]),
        a=operand_attribute(a),
        b=operand_attribute(b),
        k=a.length,
        groups=scales[0].shape[0],
        grouping=grouping,
        examples=1,
        out_dtype=jnp.dtype(out_dtype).name,
    )
    return out
