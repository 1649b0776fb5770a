"""Safetensors files made by hand, and quantized tensors in them, from the oracles alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oracles import pack, quantizer, tables

Raw = Mapping[str, tuple[str, tuple[int, ...], bytes]]

BITS = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16}
CODE_DTYPE = {
    "MXFP6_E2M3": "F6_E2M3",
    "MXFP6_E3M2": "F6_E3M2",
    "MXFP8_E4M3": "F8_E4M3",
    "MXFP8_E5M2": "F8_E5M2",
}


def header_of(tensors: Raw, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header's object, tensors one after the other as they come."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + len(data)],
        }
        position += len(data)
    return header


def file_bytes(header: Any, data: bytes) -> bytes:
    """A file of a header (an object, or bytes for what is no JSON) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def write_raw(path: Path, tensors: Raw, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes a file."""
    data = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(file_bytes(header_of(tensors, metadata), data))
    return path


def stored_parts(
    convention: str, name: str, format: str, x: np.ndarray, *, amax: float | None = None
) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], np.ndarray]:
    """A matrix quantized by the oracle, as a convention stores it, and its values float64.

    The table of the conventions is written here a second time.
    """
    rows, k = x.shape
    q = quantizer.quantize(x, format, amax=amax)
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}[q.format.element]
    codes = pack.pack(q.codes, bits)[:, : k * bits // 8].tobytes()
    blocks = k // q.format.block
    parts: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    scale_dtype = "F8_E4M3" if format == "NVFP4" else "U8"
    if convention == "gpt-oss":
        parts[name + "_blocks"] = ("U8", (rows, blocks, 16), codes)
        parts[name + "_scales"] = ("U8", (rows, blocks), q.scales.tobytes())
        return parts, q.values()
    if format in CODE_DTYPE and (convention, format) != ("compressed-tensors", "MXFP6_E2M3"):
        parts[name] = (CODE_DTYPE[format], (rows, k), codes)
    elif convention == "modelopt":
        parts[name] = ("U8", (rows, k // 2), codes)
    else:
        parts[name + "_packed"] = ("U8", (rows, k * bits // 8), codes)
    parts[name + "_scale"] = (scale_dtype, (rows, blocks), q.scales.tobytes())
    values = q.values()
    if format == "NVFP4":
        factor = q.global_scale
        if convention == "modelopt":
            parts[name + "_scale_2"] = ("F32", (), factor.tobytes())
        else:
            divisor = np.float32(1) / factor
            factor = np.float32(1) / divisor
            parts[name + "_global_scale"] = ("F32", (1,), divisor.tobytes())
        values = values * np.float64(factor)
    return parts, values


def bf16(x: np.ndarray) -> bytes:
    """f32 values as the bytes of bfloat16."""
    return tables.f32_to_bf16(x).tobytes()
