"""The header of a safetensors file: what is read from it is checked before anything else is.

A file is eight bytes (little-endian length of the header), the header (JSON: for each tensor dtype,
shape and the first byte and the end; strings under ``__metadata__``), and the bytes of the tensors,
which cover the rest of the file without holes or overlaps.

The container is read here and not with the `safetensors` package, because that one cannot write a
tensor at a time, has no NumPy types for FP6 and FP4, and drops the order of the header;
tests/checkpoint compares the two.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np

from jax_fp4 import _check


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names file, tensor, expected and got."""


@dataclasses.dataclass(frozen=True)
class Dtype:
    """A dtype of the safetensors format: bits of an element, and NumPy's type where it has one."""

    name: str
    bits: int
    numpy: np.dtype | None


# In the order of the safetensors package, which sorts the tensors of a file by it, last ones first.
# The types of 4 and 6 bits are packed and have no NumPy type of that size.
DTYPES = {
    name: Dtype(name, bits, None if kind is None else np.dtype(kind))
    for name, bits, kind in (
        ("BOOL", 8, np.bool_),
        ("F4", 4, None),
        ("F6_E2M3", 6, None),
        ("F6_E3M2", 6, None),
        ("U8", 8, np.uint8),
        ("I8", 8, np.int8),
        ("F8_E5M2", 8, ml_dtypes.float8_e5m2),
        ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
        ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
        ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
        ("I16", 16, np.int16),
        ("U16", 16, np.uint16),
        ("F16", 16, np.float16),
        ("BF16", 16, ml_dtypes.bfloat16),
        ("I32", 32, np.int32),
        ("U32", 32, np.uint32),
        ("F32", 32, np.float32),
        ("C64", 64, np.complex64),
        ("F64", 64, np.float64),
        ("I64", 64, np.int64),
        ("U64", 64, np.uint64),
    )
}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
_OF_NUMPY = {dtype.numpy: name for name, dtype in DTYPES.items() if dtype.numpy is not None}

HEADER_LIMIT = 100_000_000
"""Bytes of a header at most, as in the safetensors package."""
ATTRIBUTES = "jax_fp4"
"""Key of the metadata: JSON, {tensor: {"axis": -2, "dtype": "float32"}} where not -1, bfloat16."""
CHECKSUMS = "jax_fp4.crc32"
"""Key of the metadata, in our files only: CRC-32 of every tensor in the order of the header, and of
the header itself, taken with zeros for the checksums."""

_DAMAGED = "the file is damaged or incomplete: fetch it again"
_FOREIGN = "this is no safetensors file, or a damaged one"


def fail(
    path: Path, tensor: str | None, expected: str, got: str, way_out: str = _DAMAGED
) -> NoReturn:
    """Raises a CheckpointError."""
    what = str(path) if tensor is None else f"{path}: {tensor}"
    _check.fail("checkpoint", what, expected, got, way_out, CheckpointError)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stored tensor: ``begin`` and ``end`` count bytes from the first one after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file holds.

    Attributes:
        entries: by name, in the order of the header.
        metadata: the strings under ``__metadata__``; None where there is no such entry.
        raw: the bytes of the header, without the eight of its length.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] | None
    raw: bytes

    @property
    def data_start(self) -> int:
        """Position of the first tensor's first byte in the file."""
        return 8 + len(self.raw)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return max((entry.end for entry in self.entries.values()), default=0)

    @property
    def checksums(self) -> dict[str, int] | None:
        """CRC-32 of every tensor, where the file has them."""
        text = (self.metadata or {}).get(CHECKSUMS)
        if text is None:
            return None
        words = text.split(" ")
        return {name: int(word, 16) for name, word in zip(self.entries, words[:-1], strict=True)}


def numpy_dtype(dtype: np.dtype) -> str | None:
    """The format's name of a NumPy dtype; None where it has none."""
    return _OF_NUMPY.get(dtype)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor; None where packed elements do not fill whole bytes."""
    bits = math.prod(shape) * DTYPES[dtype].bits
    return None if bits % 8 else bits // 8


# ---- Reading -------------------------------------------------------------------------------------


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"the number {text}")


def parse_json(path: Path, data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``data``: UTF-8, no name twice, no lone surrogates, finite numbers."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        fail(path, None, f"{what} in JSON", f"{type(error).__name__}: {error}"[:200])
    if not isinstance(value, dict):
        fail(path, None, f"{what}, a JSON object", f"{type(value).__name__} {value!r:.40}")
    return value


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, value: Any, available: int) -> Entry:
    keys = {"dtype", "shape", "data_offsets"}
    if not isinstance(value, dict) or set(value) != keys:
        got = f"{sorted(value)}" if isinstance(value, dict) else repr(value)
        fail(path, name, "described by dtype, shape and data_offsets", got[:120])
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(path, name, f"of a dtype among {', '.join(DTYPES)}", repr(dtype)[:40])
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(_count, shape)):
        fail(path, name, "of a shape, a list of at most 64 sizes", repr(shape)[:120])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_count, offsets)):
        fail(path, name, "at data_offsets [first byte, end]", repr(offsets)[:120])
    begin, end = offsets
    if not begin <= end <= available:
        fail(path, name, f"within the {available} bytes after the header", f"[{begin}, {end}]")
    expected = tensor_bytes(dtype, shape)
    if expected != end - begin:
        size = "no whole number of" if expected is None else expected
        fail(path, name, f"{size} bytes for {dtype}{shape}", f"{end - begin} bytes")
    return Entry(name, dtype, tuple(shape), begin, end)


def _check_cover(path: Path, entries: Iterable[Entry], available: int) -> None:
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            relation = "overlap with another tensor" if entry.begin < position else "a hole"
            fail(path, entry.name, f"at byte {position}", f"byte {entry.begin}: {relation}")
        position = entry.end
    if position != available:
        fail(path, None, f"{position} bytes long after its header", f"{available} bytes")


def _check_metadata(path: Path, metadata: Any, tensors: int, raw: bytes) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail(path, "__metadata__", "an object of strings", repr(metadata)[:120])
    checksums = re.compile(f"(?a:[0-9a-f]{{8}} ){{{tensors}}}[0-9a-f]{{8}}")
    for key, text in metadata.items():
        what = f"__metadata__ {key}"
        if key == CHECKSUMS:
            if not checksums.fullmatch(text):
                fail(path, what, f"{tensors + 1} checksums", text[:60])
            zeros = no_checksums(tensors).encode()
            found = f"{zlib.crc32(raw.replace(text.encode(), zeros, 1)):08x}"
            if found != text[-8:]:
                fail(path, "the header", f"bytes with CRC-32 {text[-8:]}", found)
        elif key != ATTRIBUTES and (key.startswith("jax_fp4") or checksums.fullmatch(text)):
            # A damaged key must not turn the checks off.
            fail(path, what, f"{ATTRIBUTES} or {CHECKSUMS}, the entries of jax_fp4", repr(key)[:60])


def read_header(file: BinaryIO, path: Path, size: int) -> Header:
    """The header of a file of ``size`` bytes.

    Raises:
        CheckpointError: the file is truncated, damaged or of another format.
    """
    length_bytes = file.read(8)
    if len(length_bytes) < 8:
        fail(path, None, "8 bytes long or longer", f"{len(length_bytes)} bytes", _FOREIGN)
    length = int.from_bytes(length_bytes, "little")
    if length > HEADER_LIMIT:
        fail(path, None, f"with a header of at most {HEADER_LIMIT} bytes", f"{length}", _FOREIGN)
    if length > size - 8:
        fail(path, None, f"{8 + length} bytes long or longer, by its header", f"{size} bytes")
    raw = file.read(length)
    if len(raw) != length:
        fail(path, None, f"{length} bytes of header", f"{len(raw)} bytes")
    if raw[:1] != b"{":
        fail(path, None, 'with a header that starts with "{"', repr(raw[:8]), _FOREIGN)
    fields = parse_json(path, raw, "a header")
    described = "__metadata__" in fields
    metadata = fields.pop("__metadata__", None)
    available = size - 8 - length
    entries = {name: _entry(path, name, value, available) for name, value in fields.items()}
    _check_cover(path, entries.values(), available)
    if described:
        _check_metadata(path, metadata, len(entries), raw)
    return Header(entries, metadata, raw)


# ---- Writing -------------------------------------------------------------------------------------


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> Header:
    """The header of a new file.

    Args:
        tensors: (dtype, shape) of every tensor.
        metadata: strings for ``__metadata__``.

    Returns:
        A header as the safetensors package writes it: tensors sorted by dtype and name, JSON
        without blanks, padded with blanks to a multiple of 8 bytes.
    """
    entries: dict[str, Entry] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-_RANK[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        nbytes = tensor_bytes(dtype, shape)
        assert nbytes is not None, "packed rows are whole bytes"
        entries[name] = Entry(name, dtype, tuple(shape), position, position + nbytes)
        position += nbytes
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        fields[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    raw = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return Header(entries, metadata, raw + b" " * (-len(raw) % 8))


def with_checksums(header: Header, checksums: Mapping[str, int]) -> Header:
    """``header`` with its checksums filled in: as long as before, since they have a fixed width."""
    assert header.metadata is not None
    old = header.metadata[CHECKSUMS].encode()
    zeros = no_checksums(len(header.entries)).encode()
    words = [checksums[name] for name in header.entries]
    words.append(zlib.crc32(header.raw.replace(old, zeros, 1)))
    new = " ".join(f"{word:08x}" for word in words)
    raw = header.raw.replace(old, new.encode(), 1)
    return Header(header.entries, {**header.metadata, CHECKSUMS: new}, raw)


def no_checksums(tensors: int) -> str:
    """What stands for the checksums of tensors and header until they are known."""
    return " ".join(["00000000"] * (tensors + 1))
