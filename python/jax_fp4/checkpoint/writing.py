"""save: a pytree of arrays to safetensors, one file or several."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_fp4 import _check
from jax_fp4.block_array import BlockScaledArray, check_array
from jax_fp4.checkpoint.config import CONFIG_NAME, quantization_files
from jax_fp4.checkpoint.container import FileWriter, sync_folder, write_failed
from jax_fp4.checkpoint.conventions import CONVENTIONS, ConventionError, Stored, planned
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
from jax_fp4.checkpoint.reading import INDEX_NAME, Checkpoint, index_bytes

Tree = Mapping[str, Any]
_PIECE = 1 << 22  # bytes of codes that are written at once where rows are padded in memory


def shard_name(index: int, count: int) -> str:
    """The name of a file, as Hugging Face's tools number them."""
    return (
        "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
    )


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file under a temporary name first: ``path`` has the old content or the new."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        write_failed(path, error, len(data))
    finally:
        partial.unlink(missing_ok=True)


def save(
    path: str | Path,
    tree: Tree,
    *,
    convention: str | None = None,
    like: Checkpoint | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    checksums: bool = True,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint. Files appear under their names when they are complete, or not at all.

    Args:
        path: a ``.safetensors`` file, which is replaced; or a folder without a checkpoint.
        tree: arrays and BlockScaledArrays in dictionaries and lists; names of nested ones are
            joined with ".". Also what `load` returned, or a `Checkpoint`, which is read a tensor at
            a time.
        convention: "modelopt", "compressed-tensors" or "gpt-oss": how quantized tensors are named
            and stored. Where the tree has a tensor scale under its stored name, its bytes are
            written; otherwise it is derived from ``global_scale``.
        like: instead of a convention: a checkpoint with the same tensors. Files, order, headers and
            index are then the same, so that equal tensors give equal files. The default for a
            `Checkpoint` as tree.
        metadata: strings for ``__metadata__``, for example {"format": "pt"}.
        max_shard_bytes: where path is a folder: a file that is full begins another one. One file by
            default.
        checksums: store a CRC-32 for each tensor, which `Checkpoint` checks.
        config: where path is a folder: the model's config.json, to which the description of the
            quantization is added that vLLM and the program of the convention look for.

    Raises:
        CheckpointError: the tree cannot be stored so, or the disk is full. Nothing was changed.
        TypeError: an argument is of a wrong type.
    """
    path = Path(path)
    if like is None and isinstance(tree, Checkpoint):
        like = tree
    if like is not None:
        writer = _Like(like)
    else:
        _check.one_of("checkpoint.save", "convention", convention, CONVENTIONS)
        assert convention is not None
        writer = _New(path, convention, metadata, max_shard_bytes, checksums)
    arrays = tree if isinstance(tree, Checkpoint) else _flatten(path, tree)
    plan = writer.plan(path, arrays)
    folder = path.suffix != ".safetensors"
    if folder:
        _check_folder(path)
    elif len(plan.headers) != 1 or config is not None:
        got = "a config" if config is not None else f"{len(plan.headers)} files"
        fail(path, None, "a folder", got, "name a folder, or leave out the argument")
    _write(path, plan, arrays, folder)
    if folder and config is not None:
        quantized = list(plan.stored.values())
        for name, content in quantization_files(quantized, list(arrays), dict(config)).items():
            write_atomically(path / name, (json.dumps(content, indent=2) + "\n").encode())


def _check_folder(path: Path) -> None:
    if path.is_dir():
        found = [p.name for p in path.glob("*.safetensors*")] + [
            p.name for p in path.glob(CONFIG_NAME)
        ]
        if found:
            way_out = "name another folder: files of two checkpoints must not mix"
            fail(path, None, "a folder without a checkpoint", sorted(found)[0], way_out)


def _flatten(path: Path, tree: Tree) -> dict[str, Any]:
    """Arrays by name, in the tree's order."""
    found: dict[str, Any] = {}

    def visit(prefix: str, node: Any) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                visit(f"{prefix}.{key}" if prefix else str(key), value)
        elif isinstance(node, list | tuple):
            for key, value in enumerate(node):
                visit(f"{prefix}.{key}" if prefix else str(key), value)
        elif prefix in found:
            fail(path, prefix, "one tensor", "two of this name", "rename one")
        elif isinstance(node, BlockScaledArray):
            found[prefix] = check_array("checkpoint.save", prefix, node)
        elif isinstance(node, np.ndarray | np.generic | jax.Array):
            if numpy_dtype(np.dtype(node.dtype)) is None or not node.dtype.isnative:
                fail(path, prefix, "of a dtype that files have", str(node.dtype), "convert it")
            found[prefix] = node
        else:
            fail(path, prefix, "an array", type(node).__name__, "pass numpy.asarray(...)")

    visit("", tree)
    return found


# ---- What goes where -----------------------------------------------------------------------------


class _Plan:
    """Headers by file name, the index if there is one, and how quantized tensors are stored."""

    def __init__(
        self, headers: dict[str, Header], index: bytes | None, stored: dict[str, Stored]
    ) -> None:
        self.headers, self.index, self.stored = headers, index, stored
        owners = {part: s.name for s in stored.values() for part in (s.codes, s.scales)}
        self.owner = {part: owners.get(part, part) for h in headers.values() for part in h.entries}


class _Like:
    """Plans the same files as an existing checkpoint has."""

    def __init__(self, like: Checkpoint) -> None:
        self._like = like

    def plan(self, path: Path, arrays: Mapping[str, Any]) -> _Plan:
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
        return _Plan(headers, like.index, dict(like.quantized))

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


class _New:
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

    def plan(self, path: Path, arrays: Mapping[str, Any]) -> _Plan:
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
        shards = _shards(tensors, self._limit)
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
        return _Plan(headers, make_index(headers) if len(shards) > 1 else None, stored)

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


def _shards(tensors: Mapping[str, dict[str, Any]], limit: int | None) -> list[list[str]]:
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


# ---- Writing -------------------------------------------------------------------------------------


def _write(path: Path, plan: _Plan, arrays: Mapping[str, Any], folder: bool) -> None:
    made: list[Path] = []
    try:
        if folder:
            path.mkdir(parents=True, exist_ok=True)
        for name, header in plan.headers.items():
            target = path / name if folder else path
            partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
            writer = FileWriter(target, partial, header)
            try:
                _write_file(path, writer, plan, arrays)
                writer.finish()
            finally:
                writer.abandon()
            made.append(target)
        if folder and plan.index is not None:
            made.append(path / INDEX_NAME)
            write_atomically(path / INDEX_NAME, plan.index)
    except OSError as error:
        write_failed(path, error, sum(header.data_bytes for header in plan.headers.values()))
    except BaseException:
        if folder:
            for target in made:
                target.unlink(missing_ok=True)
        raise


def _write_file(path: Path, writer: FileWriter, plan: _Plan, arrays: Mapping[str, Any]) -> None:
    done: set[str] = set()
    for part in writer.header.entries:
        name = plan.owner.get(part, part)
        stored = plan.stored.get(name)
        if part in done:
            continue
        if stored is None and part not in arrays:  # a derived tensor scale
            stored = next(s for s in plan.stored.values() if s.global_scale == part)
            q = arrays[stored.name]
            writer.write(part, stored.stored_global(np.asarray(q.global_scale)))
        elif stored is None:
            writer.write(part, np.asarray(arrays[part]))
        else:
            q = arrays[name]
            check_global(path, stored, q, arrays)
            for wanted, array in ((stored.codes, None), (stored.scales, q.linear_scales())):
                if wanted not in writer.header.entries:
                    continue  # in another file
                if array is None:
                    write_codes(writer, stored, q)
                else:
                    writer.write(wanted, np.asarray(array))
                done.add(wanted)


def check_global(
    path: Path, stored: Stored, q: BlockScaledArray, arrays: Mapping[str, Any]
) -> None:
    """A tensor scale that the tree has under its stored name is that of the array."""
    if stored.global_scale is None or stored.global_scale not in arrays:
        return
    with np.errstate(divide="ignore"):
        factor = stored.global_of(np.asarray(arrays[stored.global_scale]))
    if not np.array_equal(factor, np.asarray(q.global_scale)):
        expected = f"the tensor scale of {stored.name}, global_scale {np.asarray(q.global_scale)}"
        way_out = "leave it out of the tree, and it is derived"
        fail(path, stored.global_scale, expected, f"{factor}", way_out)


def write_codes(writer: FileWriter, stored: Stored, q: BlockScaledArray) -> None:
    """The codes of ``q``, without the padding of rows in memory."""
    width = stored.row_bytes
    values = np.asarray(q.values).reshape(-1, q.values.shape[-1])
    if values.shape[-1] == width:
        writer.write(stored.codes, values)
        return
    step = max(1, _PIECE // max(1, width))
    for first in range(0, len(values), step):
        writer.write(stored.codes, values[first : first + step, :width])
