"""A conversion: the plan, the work, and how an interrupted one goes on.

While it runs, everything lies in OUT/.convert: plan, journal, and the file that is being written. A
file moves to OUT when it is complete; the index and the configuration come last. The same command
again checks the tensors of the journal by their checksums, and goes on with the next one.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jax_fp4.checkpoint.config import CONFIG_NAME, MODELOPT_CONFIG_NAME, quantization_files
from jax_fp4.checkpoint.container import FileWriter, write_failed
from jax_fp4.checkpoint.conventions import ConventionError, Stored, planned
from jax_fp4.checkpoint.header import Header, fail, numpy_dtype, parse_json
from jax_fp4.checkpoint.planning import (
    make_index,
    new_header,
    shard_name,
    split_shards,
)
from jax_fp4.checkpoint.reading import INDEX_NAME
from jax_fp4.checkpoint.writing import write_atomically
from jax_fp4.convert import quantizing
from jax_fp4.convert.journal import Journal
from jax_fp4.convert.rules import Decision, Rules
from jax_fp4.convert.sources import Source, Tensor

SLAB_BYTES = 4 << 20
"""Input bytes that are worked on at once. With what is made of them, this bounds the memory."""
# Small files of a model's folder that belong beside its weights: tokenizer, configurations.
_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".md"}
_COMPANION_LIMIT = 64 << 20

Progress = Callable[[int, str], None]
"""Called with the input bytes that are done and the name of the tensor."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A tensor of the conversion: what it is, what happens to it, and how it is stored then."""

    tensor: Tensor
    decision: Decision
    stored: Stored | None

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of what is stored of it."""
        if self.stored is None:
            dtype = numpy_dtype(self.tensor.numpy)
            assert dtype is not None
            return {self.tensor.name: (dtype, self.tensor.shape)}
        parts = self.stored.tensors()
        if self.stored.global_scale is not None:
            factor = np.ones(self.stored.lead, np.float32)
            parts[self.stored.global_scale] = ("F32", self.stored.stored_global(factor).shape)
        return parts

    @property
    def attributes(self) -> dict[str, Any]:
        """What our metadata says about it (`Checkpoint`)."""
        found: dict[str, Any] = {}
        if self.decision.axis != -1:
            found["axis"] = self.decision.axis
        if self.tensor.dtype != "bfloat16":
            found["dtype"] = self.tensor.dtype
        return found


class Job:
    """One conversion.

    Args:
        source: what is converted.
        out: the folder that gets the checkpoint.
        rules: which tensors are quantized, and how.
        convention: how the result is stored.
        max_shard_bytes: where a file ends and the next one begins.

    Raises:
        CheckpointError: the plan cannot be carried out, or ``out`` holds something else.
    """

    def __init__(
        self, source: Source, out: Path, rules: Rules, convention: str, max_shard_bytes: int
    ) -> None:
        self.source, self.out, self.convention = source, out, convention
        self._journal = Journal(out)
        rules.check_used(source.tensors)
        self.items = {name: self._item(tensor, rules) for name, tensor in source.tensors.items()}
        parts = {name: item.parts() for name, item in self.items.items()}
        self._check_names(parts)
        self._groups = self._fused(rules)
        self._amax: dict[str, np.ndarray] = {}
        shards = split_shards(parts, max_shard_bytes)
        self._shards: list[tuple[str, list[str], Header]] = []
        for i, names in enumerate(shards):
            header = new_header(
                {part: spec for name in names for part, spec in parts[name].items()},
                source.metadata,
                {
                    name: self.items[name].attributes
                    for name in names
                    if self.items[name].stored is not None and self.items[name].attributes
                },
                checksums=True,
            )
            self._shards.append((shard_name(i, len(shards)), names, header))
        self.reports: dict[str, dict[str, Any]] = {}
        self.resumed = self.resumed_bytes = 0  # tensors of an earlier run, and their input bytes

    def _item(self, tensor: Tensor, rules: Rules) -> Item:
        decision = rules.decide(tensor.name, tensor.dtype, tensor.shape)
        if decision.format is None:
            return Item(tensor, decision, None)
        *lead, rows, length = tensor.shape
        if decision.axis == -2:
            rows, length = length, rows
        try:
            stored = planned(tensor.name, decision.format, self.convention, lead, rows, length)
        except ConventionError as error:
            way_out = "choose another --convention, or keep it with a rule"
            fail(self.source.path, tensor.name, error.expected, error.got, way_out)
        return Item(tensor, decision, stored)

    def _check_names(self, parts: dict[str, dict[str, Any]]) -> None:
        owner: dict[str, str] = {}
        for name, own in parts.items():
            for part in own:
                if owner.setdefault(part, name) != name:
                    got = f"a part of {owner[part]} and of {name}"
                    fail(self.source.path, part, "stored once", got, "keep one of them by a rule")

    def _fused(self, rules: Rules) -> dict[str, list[str]]:
        """For each tensor with a tensor scale, all tensors that share it."""
        groups: dict[str, list[str]] = {}
        for name, item in self.items.items():
            if item.stored is not None and item.stored.format.tensor_scaled:
                key = rules.group(name)
                lead = "x".join(map(str, item.stored.lead))
                # Four-over-six has another tensor scale for the same amax.
                method = item.decision.method == "four-over-six"
                label = f"alone {name}" if key is None else f"{key} {lead} {method}"
                groups.setdefault(label, []).append(name)
        return {name: members for members in groups.values() for name in members}

    @property
    def total_bytes(self) -> int:
        """Input bytes."""
        return sum(item.tensor.nbytes for item in self.items.values())

    # ---- Plan and journal ------------------------------------------------------------------------

    def _plan(self) -> dict[str, Any]:
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in self.source.files()]
        headers = b"".join(header.raw for _, _, header in self._shards)
        decided = [
            (name, str(i.decision.format), i.decision.method, i.decision.axis)
            for name, i in self.items.items()
        ]
        text = json.dumps(
            [files, decided, self.convention, sorted(map(sorted, self._groups.values()))]
        )
        digest = hashlib.sha256(text.encode() + headers).hexdigest()
        return {"source": str(self.source.path.absolute()), "plan": digest}

    # ---- Work ------------------------------------------------------------------------------------

    def run(self, progress: Progress, *, restart: bool = False) -> None:
        """Converts everything that is not done yet.

        Args:
            progress: called after every slab.
            restart: drop what an interrupted run has left.

        Raises:
            CheckpointError: the input is damaged or has NaN or Inf, or the disk is full. What was
                done is kept, and the next run goes on there.
        """
        try:
            self._run(progress, restart)
        except OSError as error:
            write_failed(self.out, error, sum(h.data_bytes for _, _, h in self._shards))

    def _run(self, progress: Progress, restart: bool) -> None:
        self._journal.open(self._plan(), [file for file, _, _ in self._shards], restart=restart)
        journal = self._journal.lines
        done = 0
        for file, names, header in self._shards:
            target, partial = self.out / file, self._journal.folder / file
            if target.exists() and all(name in journal for name in names):
                for name in names:
                    self.reports[name] = journal[name]["report"]
                    done += self.items[name].tensor.nbytes
                    self.resumed_bytes += self.items[name].tensor.nbytes
                self.resumed += len(names)
                continue
            writer = FileWriter(target, partial, header, resume=True)
            try:
                for name in names:
                    size = self.items[name].tensor.nbytes
                    report = self._verified(writer, name, journal.get(name))
                    if report is None:
                        report = self._convert(
                            writer, name, lambda n, d=done, t=name: progress(d + n, t)
                        )
                        checksums = {p: writer.checksum(p) for p in self.items[name].parts()}
                        self._journal.record(name, checksums, report)
                    self.reports[name] = report
                    done += size
                    progress(done, name)
                writer.finish()
            finally:
                writer.close()
        self._finish()

    def _verified(
        self, writer: FileWriter, name: str, line: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """The report of a tensor of an earlier run, if all of its parts lie in the file."""
        if line is None:
            return None
        for part in self.items[name].parts():
            if not writer.verify(part, int(line["crc32"].get(part, "-1"), 16)):
                for other in self.items[name].parts():
                    writer.restart(other)
                return None
        self.resumed += 1
        self.resumed_bytes += self.items[name].tensor.nbytes
        return line["report"]

    def _convert(
        self, writer: FileWriter, name: str, progress: Callable[[int], None]
    ) -> dict[str, Any]:
        item = self.items[name]
        tensor = item.tensor
        report: dict[str, Any] = {
            "name": name,
            "shape": list(tensor.shape),
            "format": "-" if item.decision.format is None else item.decision.format.name,
            "method": "" if item.stored is None else item.decision.method,
            "bytes_in": tensor.nbytes,
            "bytes_out": sum(writer.header.entries[part].nbytes for part in item.parts()),
            "relative_error": 0.0,
            "reason": item.decision.reason or "rule",
        }
        if item.stored is None:
            for first in range(0, tensor.nbytes, SLAB_BYTES):
                count = min(SLAB_BYTES, tensor.nbytes - first)
                writer.write(name, self.source.data(name, first, count))
                progress(first + count)
            return {**report, "dtype": tensor.dtype}
        error, norm = self._quantize(writer, item, progress)
        report["relative_error"] = math.sqrt(error / norm) if norm else 0.0
        return {**report, "dtype": tensor.dtype}

    def _slabs(self, item: Item) -> Iterable[tuple[int, np.ndarray]]:
        """(number of the matrix, some of its rows) of a tensor, in order."""
        stored = item.stored
        assert stored is not None
        row_bytes = stored.length * item.tensor.numpy.itemsize
        step = max(1, SLAB_BYTES // row_bytes)
        for lead in range(math.prod(stored.lead)):
            for first in range(0, stored.rows, step):
                count = min(step, stored.rows - first)
                rows = self.source.rows(item.tensor.name, item.decision.axis, lead, first, count)
                yield lead, rows

    def _shared_amax(self, name: str) -> np.ndarray:
        """amax f32 of every matrix of a tensor, the largest among those that share a scale."""
        if name not in self._amax:
            largest: np.ndarray | None = None
            members = self._groups[name]
            for member in members:
                item = self.items[member]
                assert item.stored is not None
                found = np.zeros(math.prod(item.stored.lead), np.float32)
                for lead, rows in self._slabs(item):
                    found[lead] = max(found[lead], quantizing.amax(rows))
                largest = found if largest is None else np.maximum(largest, found)
            assert largest is not None
            self._amax.update(dict.fromkeys(members, largest))
        return self._amax[name]

    def _quantize(
        self, writer: FileWriter, item: Item, progress: Callable[[int], None]
    ) -> tuple[float, float]:
        """Writes a tensor; (sum of squared errors, sum of squares)."""
        stored, name = item.stored, item.tensor.name
        assert stored is not None
        count = math.prod(stored.lead)
        amax = np.ones(count, np.float32)
        if stored.format.tensor_scaled:
            amax = self._shared_amax(name)
        factors = np.ones(count, np.float32)
        sums = np.zeros(2)
        done = 0

        def put_away(rows: np.ndarray, slab: quantizing.Slab) -> None:
            writer.write(stored.codes, slab.codes)
            writer.write(stored.scales, slab.scales)
            sums[:] += quantizing.squares(rows, slab)

        # One slab is written and measured while the next one is read and quantized.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            last = None
            for lead, rows in self._slabs(item):
                slab = quantizing.quantize_rows(
                    rows, stored.format, item.decision.method, amax[lead], self.convention
                )
                if slab.bad_blocks:
                    way_out = "correct the checkpoint, or keep this tensor with a rule"
                    got = f"NaN or Inf in {slab.bad_blocks} blocks"
                    fail(self.source.path, name, "finite", got, way_out)
                factors[lead] = slab.global_scale
                if last is not None:
                    last.result()
                last = pool.submit(put_away, rows, slab)
                done += rows.nbytes
                progress(done)
            if last is not None:
                last.result()
        if stored.global_scale is not None:
            factor = stored.stored_global(factors.reshape(stored.lead))
            writer.write(stored.global_scale, factor)
        return float(sums[0]), float(sums[1])

    # ---- The end ---------------------------------------------------------------------------------

    def _finish(self) -> None:
        folder = self.source.path
        config: dict[str, Any] = {}
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if path.suffix in _COMPANIONS and path.stat().st_size <= _COMPANION_LIMIT:
                    self._copy_companion(path)
            if (folder / CONFIG_NAME).is_file():
                path = folder / CONFIG_NAME
                config = parse_json(path, path.read_bytes(), "a configuration")
        stored = [item.stored for item in self.items.values() if item.stored is not None]
        described = quantization_files(stored, list(self.items), config)
        for name, content in described.items():
            write_atomically(self.out / name, (json.dumps(content, indent=2) + "\n").encode())
        if len(self._shards) > 1:
            index = make_index({file: header for file, _, header in self._shards})
            write_atomically(self.out / INDEX_NAME, index)

    def close(self) -> None:
        """Removes what an interrupted run would need: everything is written, also the report."""
        self._journal.remove()

    def _copy_companion(self, path: Path) -> None:
        generated = (CONFIG_NAME, MODELOPT_CONFIG_NAME)
        if path.name not in generated and not path.name.endswith(".index.json") and path.is_file():
            write_atomically(self.out / path.name, path.read_bytes())
