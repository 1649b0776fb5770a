"""Checkpoint: the tensors of a safetensors file or a folder of them, read when asked for."""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_fp4._check import FLOAT_DTYPES
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.checkpoint.container import FileReader
from jax_fp4.checkpoint.conventions import (
    ConventionError,
    Stored,
    check_values,
    find_quantized,
)
from jax_fp4.checkpoint.header import ATTRIBUTES, Entry, fail, parse_json

INDEX_NAME = "model.safetensors.index.json"
"""The index of a sharded checkpoint: which tensor is in which file."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INDEX_LIMIT = 1 << 30  # bytes
_PIECE = 1 << 22  # bytes of codes that are read at once where rows have to be padded


class Checkpoint(Mapping[str, BlockScaledArray | np.ndarray]):
    """A checkpoint on disk, as a mapping from names to arrays that are read when asked for.

    A quantized tensor is a `BlockScaledArray` with NumPy parts; everything else is a NumPy array
    under its stored name, also tensor scales and activation scales. Reading a tensor needs memory
    for that tensor, and nothing stays in memory.

    Headers are checked when a checkpoint is opened: an index, files or tensors that do not fit
    together raise before anything is read.

    Args:
        path: a ``.safetensors`` file, or a folder with one, or with several and an index.

    Attributes:
        path: as given.
        files: the open files, by name.
        index: the bytes of the index; None where there is none.
        entries: every stored tensor, in the order of the files.
        quantized: how each quantized tensor is stored, by its name here.

    Raises:
        CheckpointError: something is missing, damaged, of another format or does not fit together.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: dict[str, FileReader] = {}
        self.index: bytes | None = None
        self._file_of: dict[str, FileReader] = {}
        try:
            self._open()
            self.entries: dict[str, Entry] = {
                name: file.header.entries[name] for name, file in self._file_of.items()
            }
            self.quantized: dict[str, Stored] = {}
            self._find_quantized()
            self._attributes = self._read_attributes()
        except BaseException:
            self.close()
            raise
        parts = {s.scales for s in self.quantized.values()}
        by_codes = {s.codes: s.name for s in self.quantized.values()}
        self._names = {by_codes.get(name, name): None for name in self.entries if name not in parts}

    # ---- Files -----------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self.path.is_dir():
            reader = self.files[self.path.name] = FileReader(self.path)
            self._file_of = dict.fromkeys(reader.header.entries, reader)
            return
        found = sorted(p.name for p in self.path.glob("*.safetensors"))
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            names = ", ".join(p.name for p in indices)
            fail(self.path, None, "a folder with one index", names, "name one .safetensors file")
        if indices:
            self._open_index(indices[0])
            return
        if len(found) != 1:
            names = ", ".join(found) or "none"
            way_out = "name one file, or add the index that belongs to them"
            fail(self.path, None, "a folder with an index or one .safetensors file", names, way_out)
        reader = self.files[found[0]] = FileReader(self.path / found[0])
        self._file_of = dict.fromkeys(reader.header.entries, reader)

    def _open_index(self, path: Path) -> None:
        try:
            if path.stat().st_size > _INDEX_LIMIT:
                fail(path, None, f"of at most {_INDEX_LIMIT} bytes", f"{path.stat().st_size}")
            self.index = path.read_bytes()
        except OSError as error:
            fail(path, None, "a file that can be read", str(error.strerror), "check the path")
        where = parse_json(path, self.index, "an index").get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(f, str) for f in where.values()):
            fail(path, "weight_map", "an object of file names", repr(where)[:80])
        for name in dict.fromkeys(where.values()):
            if Path(name).name != name or not name.endswith(".safetensors"):
                fail(path, "weight_map", "names of .safetensors files beside the index", repr(name))
            self.files[name] = FileReader(self.path / name)
        for name, reader in self.files.items():
            for tensor in reader.header.entries:
                if where.get(tensor) != name:
                    got = repr(where.get(tensor)) if tensor in where else "not in the index"
                    fail(path, tensor, f"in {name}, which holds it", got)
                self._file_of[tensor] = reader
        for tensor, name in where.items():
            if tensor not in self._file_of:
                fail(self.path / name, tensor, "in this file, by the index", "no such tensor")

    def _find_quantized(self) -> None:
        try:
            self.quantized = {s.name: s for s in find_quantized(self.entries).values()}
        except ConventionError as error:
            self._fail(error)

    def _fail(self, error: ConventionError) -> None:
        reader = self._file_of.get(error.tensor)
        path = self.path if reader is None else reader.path
        way_out = "the checkpoint is damaged, or quantized in a way that is not read here"
        fail(path, error.tensor, error.expected, error.got, way_out)

    def _read_attributes(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for reader in self.files.values():
            text = (reader.header.metadata or {}).get(ATTRIBUTES)
            if text is None:
                continue
            what = f"__metadata__ {ATTRIBUTES}"
            for name, value in parse_json(reader.path, text.encode(), what).items():
                stored = self.quantized.get(name)
                if stored is None:
                    fail(reader.path, what, "about quantized tensors of the file", repr(name)[:80])
                ndim = len(stored.lead) + 2
                axes = range(-ndim, 0)
                good = isinstance(value, dict) and set(value) <= {"axis", "dtype"}
                good = good and value.get("dtype", "bfloat16") in FLOAT_DTYPES
                axis = value.get("axis", -1) if good else None
                if isinstance(axis, bool) or not isinstance(axis, int) or axis not in axes:
                    expected = f"axis in [{-ndim}, -1], dtype among {', '.join(FLOAT_DTYPES)}"
                    fail(reader.path, f"{name} in {what}", expected, repr(value)[:80])
                found[name] = value
        return found

    def close(self) -> None:
        """Closes the files."""
        for reader in self.files.values():
            reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Tensors ---------------------------------------------------------------------------------

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """The strings under ``__metadata__`` of all files."""
        merged: dict[str, str] = {}
        for reader in self.files.values():
            merged.update(reader.header.metadata or {})
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> BlockScaledArray | np.ndarray:
        """Reads a tensor.

        Raises:
            KeyError: there is no such tensor.
            CheckpointError: its data are damaged.
        """
        if name not in self._names:
            raise KeyError(name)
        stored = self.quantized.get(name)
        return self._read_quantized(stored) if stored is not None else self.stored(name)

    def stored(self, name: str) -> np.ndarray:
        """One stored tensor as it is in the file: codes, scales and everything else.

        Args:
            name: a key of `entries`.

        Returns:
            A NumPy array; packed types as uint8, the last axis counting bytes.
        """
        if name not in self._file_of:
            raise KeyError(name)
        return self._file_of[name].read(name)

    def reader(self, name: str) -> FileReader:
        """The file that a stored tensor is in."""
        return self._file_of[name]

    def _read_quantized(self, stored: Stored) -> BlockScaledArray:
        lead = stored.lead
        scales = self.stored(stored.scales).view(np.uint8)
        factor = np.ones(lead, np.float32)
        tensor_scale = None
        if stored.global_scale is not None:
            tensor_scale = self.stored(stored.global_scale)
        try:
            check_values(stored, scales, tensor_scale)
        except ConventionError as error:
            self._fail(error)
        if tensor_scale is not None:
            factor = np.asarray(stored.global_of(tensor_scale), np.float32)
        attributes = self._attributes.get(stored.name, {})
        dtype = attributes.get("dtype", "bfloat16")
        parts: dict[str, Any] = {
            "values": self._read_codes(stored),
            "scales": scales,
            "global_scale": factor,
        }
        return BlockScaledArray(
            **parts,
            amax=None,
            format=stored.format,
            axis=attributes.get("axis", -1),
            layout="linear",
            length=stored.length,
            dtype=_BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype),
        )

    def _read_codes(self, stored: Stored) -> np.ndarray:
        """uint8 [*lead, rows, format.row_bytes(length)]: rows are padded where files have none."""
        reader = self._file_of[stored.codes]
        width, padded = stored.row_bytes, stored.format.row_bytes(stored.length)
        shape = (*stored.lead, stored.rows)
        if width == padded:
            return reader.read(stored.codes).view(np.uint8).reshape(*shape, width)
        rows = math.prod(shape)
        values = np.zeros((rows, padded), np.uint8)
        step = max(1, _PIECE // max(1, width))
        piece = np.empty((min(step, rows), width), np.uint8)
        checksum = 0
        for first in range(0, rows, step):
            part = piece[: min(step, rows - first)]
            reader.read_into(stored.codes, first * width, part.reshape(-1).data)
            checksum = zlib.crc32(part.data, checksum)
            values[first : first + len(part), :width] = part
        reader.check(stored.codes, checksum)
        return values.reshape(*shape, padded)


def load(path: str | Path) -> dict[str, BlockScaledArray | np.ndarray]:
    """The whole checkpoint as a pytree: a dictionary of its tensors, named as in the file.

    Args:
        path: as for `Checkpoint`.

    Returns:
        Everything that a `Checkpoint` holds, in memory.

    Raises:
        CheckpointError: as `Checkpoint`.
    """
    with Checkpoint(path) as checkpoint:
        return dict(checkpoint)


def index_bytes(files: Mapping[str, str], total_bytes: int) -> bytes:
    """An index: {tensor: file} and the bytes of all tensors, as Hugging Face's tools write it."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()
