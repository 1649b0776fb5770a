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
from jax_fp4.checkpoint.conventions import CONVENTIONS, Stored
from jax_fp4.checkpoint.header import fail, numpy_dtype
from jax_fp4.checkpoint.planning import Like, New, Plan
from jax_fp4.checkpoint.reading import INDEX_NAME, Checkpoint

Tree = Mapping[str, Any]
_PIECE = 1 << 22  # bytes of codes that are written at once where rows are padded in memory


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
        writer = Like(like)
    else:
        _check.one_of("checkpoint.save", "convention", convention, CONVENTIONS)
        assert convention is not None
        writer = New(path, convention, metadata, max_shard_bytes, checksums)
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


# ---- Writing -------------------------------------------------------------------------------------


def _write(path: Path, plan: Plan, arrays: Mapping[str, Any], folder: bool) -> None:
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


def _write_file(path: Path, writer: FileWriter, plan: Plan, arrays: Mapping[str, Any]) -> None:
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
            done |= _write_quantized(path, writer, stored, arrays)


def _write_quantized(
    path: Path, writer: FileWriter, stored: Stored, arrays: Mapping[str, Any]
) -> set[str]:
    """Writes codes and scales, as far as they are in this file; their stored names.

    A function of its own, so that the array is gone before the next one is read.
    """
    q = arrays[stored.name]
    check_global(path, stored, q, arrays)
    if stored.codes in writer.header.entries:
        write_codes(writer, stored, q)
    if stored.scales in writer.header.entries:
        writer.write(stored.scales, np.asarray(q.linear_scales()))
    return {stored.codes, stored.scales}


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
