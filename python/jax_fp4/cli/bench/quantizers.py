"""The case `quantize`: bfloat16 matrices to NVFP4."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.cli.bench import check
from jax_fp4.cli.bench.check import QuantizeCheck
from jax_fp4.cli.bench.inputs import optional
from jax_fp4.cli.bench.measure import Case, Peer

_NOTHING = np.zeros(0)


def jnp_nvfp4(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best formulation in jnp that we know: compare with the midpoints, then pack two codes."""
    blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, 16)
    tensor = jnp.max(jnp.abs(blocks)) / 2688
    scales = (jnp.max(jnp.abs(blocks), axis=-1) / (6 * tensor)).astype(jnp.float8_e4m3fn)
    scaled = blocks / (scales.astype(jnp.float32) * tensor)[..., None]
    magnitude = jnp.abs(scaled)
    code = jnp.where(scaled < 0, 8, 0).astype(jnp.uint8)
    for midpoint in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        code += (magnitude > midpoint).astype(jnp.uint8)
    pairs = code.reshape(x.shape[0], -1, 2)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return packed, jax.lax.bitcast_convert_type(scales, jnp.uint8), tensor


def _decoded(
    packed: Any, scales: Any, tensor: Any, rows: np.ndarray, limited: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some rows of an NVFP4 matrix; how far off an element may be, if it is to be looked at.

    The widest step of E2M1 is from 4 to 6, so half a step is one scale at most.
    """
    codes = np.asarray(scales)[rows]
    values = check.nvfp4_values(np.asarray(packed)[rows], codes, float(tensor))
    if not limited:
        return values, rows, _NOTHING
    steps = np.repeat(check.ue4m3(codes), 16, axis=1) * np.float32(tensor)
    return values, rows, steps * np.float32(1.001)


def quantize(rows: int, columns: int, full_rows: int) -> Case:
    """A matrix [rows, columns], quantized along its columns, or along both axes."""

    @functools.lru_cache(2)
    def matrix(s: int) -> jax.Array:
        x = np.random.default_rng([s, rows, columns]).standard_normal((rows, columns), np.float32)
        return jnp.asarray(x, jnp.bfloat16)

    @functools.lru_cache(2)
    def values(s: int) -> np.ndarray:
        return check.bfloat16_values(matrix(s))

    packed_bytes = rows * columns * 9 // 16

    def peer(
        name: str, call: Callable[[Any], Any], decode: Any, copies: int = 1, high: float = 0.2
    ) -> Peer:
        moved = rows * columns * 2 + copies * packed_bytes
        least = copies * packed_bytes
        return Peer(
            name,
            lambda s: (matrix(s),),
            jax.jit(call),
            QuantizeCheck(values, decode, least, high),
            moved,
            ours=name.startswith("jax_fp4"),
        )

    def ours(copies: Sequence[Any], picked: np.ndarray) -> list[Any]:
        return [_decoded(q.values, q.scales, q.global_scale, picked, True) for q in copies]

    def qwix(name: str) -> Peer:
        module = optional("qwix")

        def decode(q: Any, picked: np.ndarray) -> list[Any]:
            return [(np.asarray(module.dequantize(q), np.float32)[picked], picked, _NOTHING)]

        call = functools.partial(module.quantize, qtype="nvfp4", tiled_axes={1: 16})
        return peer(name, call, decode, high=0.4)  # it has no tensor scale

    def by_jnp(result: Any, picked: np.ndarray) -> list[Any]:
        packed, scales, tensor = result
        return [_decoded(packed, scales, tensor, picked, limited=False)]

    peers: list[tuple[str, Callable[[str], Peer]]] = [
        (
            "jax_fp4.quantize",
            lambda name: peer(
                name, lambda x: jax_fp4.quantize(x), lambda q, picked: ours([q], picked)
            ),
        ),
        (
            "jax_fp4.quantize_both",
            lambda name: peer(name, lambda x: jax_fp4.quantize_both(x), ours, copies=2),
        ),
        (
            "jnp, compare and pack",
            lambda name: peer(name, jnp_nvfp4, by_jnp),
        ),
        ("qwix nvfp4", qwix),
    ]
    cut = "" if rows == full_rows else f", rows of {full_rows}"
    return Case(
        "quantize", "bf16 -> NVFP4", f"{rows}x{columns}{cut}", "GB/s of input",
        2.0 * rows * columns / 1e9, 0.0,
        [(name, functools.partial(make, name)) for name, make in peers],
    )  # fmt: skip
