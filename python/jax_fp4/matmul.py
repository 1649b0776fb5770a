"""scaled_matmul: the product of two quantized arrays, and the primitive under it.

The primitive works on batches: every operand has a leading axis of size 1 (shared) or ``batch``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _check, _compat, _native, sharding
from jax_fp4.block_array import (
    BlockScaledArray,
    check_array,
    flatten_lead,
    operand_attribute,
    operand_dims,
)


def _abstract(a_values: Any, *rest: Any, batch: int, out_dtype: str, **_: Any) -> list[Any]:
    shape = (batch, a_values.shape[1], rest[2].shape[1])
    return [_compat.result_aval(shape, jnp.dtype(out_dtype), (a_values, *rest))]


def _groups(has_bias: bool, has_accumulate: bool) -> list[range]:
    """Positions of the arrays that share a batch axis: a, b, then bias and accumulate if given."""
    extra = int(has_bias) + int(has_accumulate)
    return [range(3), range(3, 6), *(range(6 + i, 7 + i) for i in range(extra))]


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, batch: int, **params: Any) -> Any:
    """Merges a vmap's axis into the batch; an operand that has neither stays shared."""
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)

    def merge(arg: Any, dim: int | None) -> Any:
        arg = (
            jnp.broadcast_to(arg[None], (size, *arg.shape))
            if dim is None
            else jnp.moveaxis(arg, dim, 0)
        )
        arg = jnp.broadcast_to(arg, (size, batch, *arg.shape[2:]))
        return sharding.reshape(arg, (size * batch, *arg.shape[2:]))

    merged: list[Any] = []
    for group in _groups(params["has_bias"], params["has_accumulate"]):
        shared = all(dims[i] is None and args[i].shape[0] == 1 for i in group)
        merged += [args[i] if shared else merge(args[i], dims[i]) for i in group]
    (out,) = sharding.bind(_scaled_matmul_p, *merged, batch=size * batch, **params)
    return [sharding.reshape(out, (size, batch, *out.shape[1:]))], [0]


def _workspace(
    a_values: Any, *rest: Any, a: str, b: str, k: int, batch: int, out_dtype: str, **_: Any
) -> int:
    b_values = rest[2]
    shape = (batch, a_values.shape[1], b_values.shape[1], k)
    batched = (a_values.shape[0] != 1, b_values.shape[0] != 1)
    return _native.gemm_workspace(a, b, shape, batched, out_dtype)


_scaled_matmul_p = _native.make_primitive(
    "jax_fp4_scaled_matmul",
    _abstract,
    _batch,
    ("a", "b", "k", "batch", "has_bias", "has_accumulate", "out_dtype"),
    "its operands are codes. Use jax_fp4.dot, whose gradients are defined.",
    attributes=lambda batch, out_dtype, **rest: rest,
    workspace=_workspace,
)


def _rule(
    *shapes: Sequence[int],
    a: str,
    b: str,
    k: int,
    batch: int,
    has_bias: bool,
    has_accumulate: bool,
    out_dtype: str,
) -> sharding.Rule:
    sizes, dims = operand_dims(batch, k, [("m", a, shapes[0]), ("n", b, shapes[3])])
    rows, cols = shapes[0][1], shapes[3][1]
    result = (("b", 1), ("m", rows // sizes["m"]), ("n", cols // sizes["n"]))
    added: list[sharding.Dims] = []
    for shape in shapes[6:]:
        own = result[0] if shape[0] == batch else None
        added.append((own, *result[1:]) if len(shape) == 3 else (own, result[2]))

    def local(call: Any, shards: Any, placement: sharding.Placement) -> list[jax.Array]:
        own = {"k": k // placement.count("k"), "batch": batch // placement.count("b")}
        sums = placement.axes("k")
        if not sums:
            return list(call(*shards, **own))
        # Sums over K are completed in float32; what is added to them comes after.
        own |= {"has_bias": False, "has_accumulate": False, "out_dtype": "float32"}
        (out,) = call(*shards[:6], **own)
        for dimension, axes in placement.scatter:
            out = _compat.sum_scattered(out, axes, dimension)
            sums = tuple(axis for axis in sums if axis not in axes)
        if sums:
            out = jax.lax.psum(out, sums)
        more = list(shards[6:])
        if has_bias:
            out = out + more.pop(0).astype(jnp.float32)[:, None]
        if has_accumulate:
            out = out + more.pop(0).astype(jnp.float32)
        return [out.astype(out_dtype)]

    return sharding.Rule(
        sizes=sizes,
        operands=(*dims, *added),
        results=(result,),
        leading=(0, 3),
        order="bmnk",
        local=local,
        scattered="" if added else "k",
    )


sharding.register(_scaled_matmul_p, _rule)


def multiply(
    a: BlockScaledArray,
    b: BlockScaledArray,
    out_dtype: Any,
    bias: jax.Array | None = None,
    accumulate: jax.Array | None = None,
    wish: jax.NamedSharding | None = None,
) -> jax.Array:
    """D [batch, M, N] of a [batch or 1, M, K] and b [batch or 1, N, K]; nothing is checked.

    ``wish`` says how D is wanted on an explicit mesh: sums are scattered where it allows that.
    """
    operands = [a.values, a.scales, a.global_scale, b.values, b.scales, b.global_scale]
    batches = [a.values.shape[0], b.values.shape[0]]
    if bias is not None:
        operands.append(bias)
        batches.append(bias.shape[0])
    if accumulate is not None:
        operands.append(accumulate)
        batches.append(accumulate.shape[0])
    (out,) = sharding.bind(
        _scaled_matmul_p,
        *operands,
        wish=wish,
        a=operand_attribute(a),
        b=operand_attribute(b),
        k=a.length,
        batch=next((n for n in batches if n != 1), 1),
        has_bias=bias is not None,
        has_accumulate=accumulate is not None,
        out_dtype=jnp.dtype(out_dtype).name,
    )
    return out


def _rotation(q: BlockScaledArray) -> str:
    if q.signs is None:
        return "not rotated"
    return "negated elements " + (str([i for i in range(16) if q.signs >> i & 1]))


def scaled_matmul(
    a: BlockScaledArray,
    b: BlockScaledArray,
    *,
    out_dtype: Any = jnp.float32,
    bias: jax.Array | None = None,
    accumulate: jax.Array | None = None,
) -> jax.Array:
    """The product of two arrays that are quantized along their contracted axis.

    ``D[..., m, n] = cvt((alpha * sum_k a[..., m, k] * b[..., n, k] + bias[n]) + C[..., m, n])``
    with ``alpha = a.global_scale * b.global_scale`` and C = ``accumulate``, each operation one f32
    rounding (the sum over k: see docs/numerics.md).

    Args:
        a: [..., M, K], stored with K last, in any format.
        b: [..., N, K]; its block size is that of a (NVFP4 with NVFP4, MX and FP8 with one another).
        out_dtype: float32, bfloat16 or float16.
        bias: float32, bfloat16 or float16 [N].
        accumulate: float32, bfloat16 or float16 [..., M, N].

    Returns:
        ``out_dtype`` [..., M, N]; leading dimensions are equal, or absent on one side.

    Raises:
        TypeError: an argument is of a wrong type or dtype.
        ValueError: shapes or formats do not go together.
    """
    where = "scaled_matmul"
    a, b = check_array(where, "a", a), check_array(where, "b", b)
    out = _check.float_dtype(where, "out_dtype", out_dtype)
    if a.length != b.length:
        _check.fail(
            where,
            "b",
            f"quantized along an axis of length K = {a.length}, that of a",
            f"{b.length}",
            "quantize both along the axis that is contracted",
        )
    if a.format.block != b.format.block:
        _check.fail(
            where,
            "b.format",
            f"a format with blocks of {a.format.block}, those of a ({a.format})",
            f"{b.format} with blocks of {b.format.block}",
            "quantize both in NVFP4, or both in MX or FP8 formats",
        )
    if a.signs != b.signs:
        _check.fail(
            where,
            "b",
            f"rotated like a ({_rotation(a)}): the Hadamard transform cancels only on both sides",
            _rotation(b),
            "quantize both with the same hadamard=",
        )
    lead_a, lead_b = a.values.shape[:-2], b.values.shape[:-2]
    if lead_a and lead_b and lead_a != lead_b:
        _check.fail(
            where,
            "b",
            f"of leading dimensions {lead_a}, those of a, or none",
            f"{lead_b}",
            "broadcast one of them, or use jax.vmap",
        )
    lead = lead_a or lead_b
    rows, cols = a.values.shape[-2], b.values.shape[-2]
    if bias is not None:
        bias = _check.float_array(where, "bias", bias)
        if bias.shape != (cols,):
            _check.fail(
                where,
                "bias",
                f"of shape ({cols},) = (N,)",
                str(bias.shape),
                "pass one value a column",
            )
        bias = bias[None]
    if accumulate is not None:
        accumulate = _check.float_array(where, "accumulate", accumulate)
        if accumulate.shape != (*lead, rows, cols):
            _check.fail(
                where,
                "accumulate",
                f"of shape {(*lead, rows, cols)}, that of the result",
                str(accumulate.shape),
                "broadcast it first",
            )
        accumulate = sharding.reshape(accumulate, (math.prod(lead), rows, cols))
    product = multiply(flatten_lead(a), flatten_lead(b), out, bias, accumulate)
    return sharding.reshape(product, (*lead, rows, cols))
