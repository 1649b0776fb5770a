"""What `save` writes: which tensors go to which file, and how each is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_fp4.block_array import BlockScaledArray
from jax_fp4.checkpoint.conventions import ConventionError, Stored, planned
from jax_fp4.checkpoint.header import (
    ATTRIBUTES,
    CHECKSUMS,
    Header,
    fail,
    make_header,
    no_checksums,
    numpy_dtype,
    tensor_bytes,
)
from jax_fp4.checkpoint.reading import Checkpoint, index_bytes


def shard_name(index: int, count: int) -> str:
    """The name of a file, as Hugging Face's tools number them."""
    return (
        "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
    )


class Plan:
    """Headers by file name, the index if there is one, and how quantized tensors are stored."""

    def __init__(
        self, headers: dict[str, Header], index: bytes | None, stored: dict[str, Stored]
    ) -> None:
        self.headers, self.index, self.stored = headers, index, stored
        owners = {part: s.name for s in stored.values() for part in (s.codes, s.scales)}
        self.owner = {part: owners.get(part, part) for h in headers.values() for part in h.entries}


class Like:
    """Plans the same files as an existing checkpoint has."""

    def __init__(self, like: Checkpoint) -> None:
        self._like = like

    def plan(self, path: Path, arrays: Mapping[str, Any]) -> Plan:
        """The plan for ``arrays``, which are named, shaped and stored as in `like`."""
        like = self._like
        for name in [*arrays, *like]:
            if name not in like or name not in arrays:
                got = "not there" if name in arrays else "missing in the tree"
                fail(path, name, "in the tree and in `like`", got, "pass a convention instead")
        if arrays is not like:
            for name, array in arrays.items():
                self._check_same(path, name, array)
        headers = {name: reader.header for name, reader in like.files.items()}
        if not path.suffix == ".safetensors" and like.index is None and len(headers) == 1:
            headers = {shard_name(0, 1): next(iter(headers.values()))}
        return Plan(headers, like.index, dict(like.quantized))

    def _check_same(self, path: Path, name: str, array: Any) -> None:
        stored = self._like.quantized.get(name)
        way_out = "pass a convention instead of `like`"
        if stored is None:
            entry = self._like.entries[name]
            expected = f"{entry.dtype}{list(entry.shape)}"
            got = type(array).__name__
            if not isinstance(array, BlockScaledArray):
                got = f"{numpy_dtype(np.dtype(array.dtype))}{list(array.shape)}"
        else:
            expected = f"{stored.format}{[*stored.lead, stored.rows, stored.length]}"
            got = type(array).__name__
            if isinstance(array, BlockScaledArray):
                got = f"{array.format}{[*array.values.shape[:-1], array.length]}"
        if got != expected:
            fail(path, name, f"{expected} as in `like`", got, way_out)


class New:
    """Plans files of a convention."""

    def __init__(
        self,
        path: Path,
        convention: str,
        metadata: Mapping[str, str] | None,
        max_shard_bytes: int | None,
        checksums: bool,
    ) -> None:
        self._convention, self._metadata = convention, metadata
        self._limit = max_shard_bytes
        self._checksums = checksums
        for key, value in (metadata or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):
                fail(path, "metadata", "strings", repr({key: value})[:80], "convert them")

    def plan(self, path: Path, arrays: Mapping[str, Any]) -> Plan:
        """The plan for ``arrays``, in their order."""
        stored: dict[str, Stored] = {}
        tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}  # of each array
        for name, array in arrays.items():
            if isinstance(array, BlockScaledArray):
                stored[name] = self._stored(path, name, array)
                tensors[name] = stored[name].tensors()
                tensor_scale = stored[name].global_scale
                if tensor_scale is not None and tensor_scale not in arrays:
                    shape = stored[name].stored_global(np.asarray(array.global_scale)).shape
                    tensors[name][tensor_scale] = ("F32", shape)
            else:
                dtype = numpy_dtype(np.dtype(array.dtype))
                assert dtype is not None
                tensors[name] = {name: (dtype, tuple(array.shape))}
        owner: dict[str, str] = {}
        for name, parts in tensors.items():
            for part in parts:
                if owner.setdefault(part, name) != name:
                    fail(
                        path,
                        part,
                        "stored once",
                        f"a part of {owner[part]} and of {name}",
                        "rename one",
                    )
        shards = split_shards(tensors, self._limit)
        attributes = {
            name: {
                key: value
                for key, value, default in (
                    ("axis", array.axis, -1),
                    ("dtype", np.dtype(array.dtype).name, "bfloat16"),
                )
                if value != default
            }
            for name, array in arrays.items()
            if isinstance(array, BlockScaledArray)
        }
        headers = {}
        for i, names in enumerate(shards):
            parts = {part: spec for name in names for part, spec in tensors[name].items()}
            own = {name: attributes[name] for name in names if attributes.get(name)}
            headers[shard_name(i, len(shards))] = new_header(
                parts, self._metadata, own, checksums=self._checksums
            )
        return Plan(headers, make_index(headers) if len(shards) > 1 else None, stored)

    def _stored(self, path: Path, name: str, q: BlockScaledArray) -> Stored:
        *lead, rows, _ = q.values.shape
        try:
            stored = planned(name, q.format, self._convention, lead, rows, q.length)
        except ConventionError as error:
            way_out = "store this one unquantized, or choose another format or convention"
            fail(path, name, error.expected, error.got, way_out)
        if q.signs is not None:
            way_out = "quantize without hadamard, which no convention has"
            fail(path, name, "not rotated", "a Hadamard transform", way_out)
        if not q.format.tensor_scaled and (np.asarray(q.global_scale) != 1).any():
            fail(path, name, f"{q.format} with global_scale 1", "another", "requantize it")
        return stored


def split_shards(tensors: Mapping[str, dict[str, Any]], limit: int | None) -> list[list[str]]:
    """Arrays in order, a new file where one would exceed the limit; each has one array at least."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, parts in tensors.items():
        nbytes = sum(tensor_bytes(*spec) or 0 for spec in parts.values())
        if limit is not None and shards[-1] and used + nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


def new_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
    attributes: Mapping[str, Mapping[str, Any]],
    *,
    checksums: bool,
) -> Header:
    """A header with our entries of the metadata."""
    merged = {k: v for k, v in (metadata or {}).items() if k not in (CHECKSUMS, ATTRIBUTES)}
    if attributes:
        merged[ATTRIBUTES] = json.dumps(attributes, separators=(",", ":"))
    if checksums:
        merged[CHECKSUMS] = no_checksums(len(tensors))
    return make_header(tensors, merged or None)


def make_index(headers: Mapping[str, Header]) -> bytes:
    """The index of several files."""
    files = {name: file for file, header in headers.items() for name in header.entries}
    return index_bytes(files, sum(header.data_bytes for header in headers.values()))
