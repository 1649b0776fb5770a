"""The plan and the journal of a conversion, in OUT/.convert while it is not finished."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_fp4.checkpoint.header import fail, parse_json
from jax_fp4.checkpoint.writing import write_atomically

_FOLDER = ".convert"
_PLAN, _LINES = "plan.json", "journal.jsonl"


class Journal:
    """A line for each tensor that is done: checksums of what is stored of it, and its report.

    Attributes:
        folder: where it lies, and files that are not complete.
        lines: those of an earlier run, by tensor.
    """

    def __init__(self, out: Path) -> None:
        self._out, self.folder = out, out / _FOLDER
        self.lines: dict[str, dict[str, Any]] = {}

    def open(self, plan: Mapping[str, str], files: Sequence[str], *, restart: bool) -> None:
        """Begins, or takes up what an interrupted run of the same plan has left.

        Args:
            plan: what is converted how: ``source``, and a digest of everything that matters.
            files: names of the files that will be made.
            restart: drop what an interrupted run has left.

        Raises:
            CheckpointError: the folder holds another checkpoint or another unfinished conversion.
        """
        path = self.folder / _PLAN
        self._out.mkdir(parents=True, exist_ok=True)
        if restart and path.exists():
            for name in files:
                (self._out / name).unlink(missing_ok=True)
            shutil.rmtree(self.folder)
        if path.exists():
            found = parse_json(path, path.read_bytes(), "a plan")
            if found != plan:
                got = f"that of another conversion, of {found.get('source')}"
                way_out = "repeat the interrupted command, or add --restart to drop its work"
                fail(self._out, None, "a folder with the same conversion", got, way_out)
            self._read()
            return
        others = sorted(p.name for p in self._out.glob("*.safetensors*"))
        if others:
            way_out = "name another folder: files of two checkpoints must not mix"
            fail(self._out, None, "a folder without a checkpoint", others[0], way_out)
        self.folder.mkdir(exist_ok=True)
        (self.folder / _LINES).write_bytes(b"")
        write_atomically(path, json.dumps(plan).encode())

    def _read(self) -> None:
        """Complete lines only: the last one may have been cut by the interruption."""
        path = self.folder / _LINES
        data = path.read_bytes() if path.exists() else b""
        complete, _, rest = data.rpartition(b"\n")
        for line in complete.split(b"\n") if complete else []:
            content = parse_json(path, line, "a journal")
            self.lines[content["tensor"]] = content
        if rest:
            os.truncate(path, len(data) - len(rest))

    def record(self, name: str, checksums: Mapping[str, int], report: Mapping[str, Any]) -> None:
        """Adds the line of a tensor."""
        crc32 = {part: f"{value:08x}" for part, value in checksums.items()}
        line = json.dumps({"tensor": name, "crc32": crc32, "report": report}) + "\n"
        with open(self.folder / _LINES, "ab") as file:
            file.write(line.encode())

    def remove(self) -> None:
        """The conversion is finished."""
        shutil.rmtree(self.folder)
