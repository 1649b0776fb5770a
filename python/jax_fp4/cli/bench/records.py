"""What a run leaves: records, as JSON lines.

A figure that was measured and one that a model computed are different types with different fields:
`Measured` has ``seconds``, `Modelled` has ``modelled_seconds``, and neither has the other's. A
table of measured figures takes `Measured` only (see `table.py`), so that no modelled number can
come to stand in it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Measured:
    """One implementation on one shape: every sample, with the ceilings measured right before it.

    Attributes:
        op: "gemm", "quantize", "dot" or "layer".
        case: the rest of the question: "forward", the dtype, ... ; "" if there is only one.
        shape: the label.
        peer: the implementation.
        ours: whether it is this package.
        cores: processors that the process had; 0 on a GPU.
        unit: of `rate`.
        work: units of work in a call: rate = work / seconds.
        flops: in a call.
        bytes: that have to move at least: operands and results once.
        seconds: wall time of every timed call.
        cpu_seconds: processor time of all threads of the process in each of them.
        matmul_flops: FLOP/s of the matmul probe right before each call, on all cores.
        copy_bytes: bytes/s, read and written, of the copy probe right before each call.
        verdict: what the check of all these calls' results says.
        correct: whether every one of them was right.
    """

    op: str
    case: str
    shape: str
    peer: str
    ours: bool
    cores: int
    unit: str
    work: float
    flops: float
    bytes: float
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    matmul_flops: tuple[float, ...]
    copy_bytes: tuple[float, ...]
    verdict: str
    correct: bool

    @property
    def question(self) -> tuple[str, str, str, int]:
        """What is compared with one another: all but the peer."""
        return self.op, self.case, self.shape, self.cores

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What is the same row in another run."""
        return (*self.question, self.peer)

    @property
    def median_seconds(self) -> float:
        """Of the samples."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Units a second, by the median."""
        return self.work / self.median_seconds

    @property
    def best(self) -> float:
        """Units a second, by the fastest sample."""
        return self.work / min(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range of the samples over their median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_seconds

    @property
    def roofline(self) -> float:
        """Part of the ceiling: least time by either probe, over the time taken (medians)."""
        return max(self._least_seconds()) / self.median_seconds

    def _least_seconds(self) -> tuple[float, float]:
        return (
            self.flops / statistics.median(self.matmul_flops),
            self.bytes / statistics.median(self.copy_bytes),
        )

    @property
    def bound(self) -> str:
        """Which ceiling is the lower one: "matmul" or "copy"."""
        by_matmul, by_copy = self._least_seconds()
        return "matmul" if by_matmul >= by_copy else "copy"


@dataclasses.dataclass(frozen=True)
class Modelled:
    """A kernel of a GPU in the PTX machine: counted and modelled, measured by nobody.

    Attributes:
        op: as of `Measured`.
        shape: the label.
        kernel: its name, and whose it is.
        chip: that is modelled.
        modelled_seconds: by the cycle model.
        modelled_flops: FLOP in the call.
        instructions: warp instructions, counted.
        dram_bytes: read and written, modelled.
        tensor_busy: part of the steady state in which the tensor cores work, modelled.
        note: conditions.
    """

    op: str
    shape: str
    kernel: str
    chip: str
    modelled_seconds: float
    modelled_flops: float
    instructions: int
    dram_bytes: float
    tensor_busy: float
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A peer that did not run, and why.

    Attributes:
        op: as of `Measured`.
        case: the same.
        shape: the label, "" for all.
        peer: the implementation.
        reason: one line.
    """

    op: str
    case: str
    shape: str
    peer: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Where and how: see `conditions.py`.

    Attributes:
        values: by topic.
    """

    values: dict[str, Any]


Record = Measured | Modelled | Skipped | Conditions
_KINDS: dict[str, type] = {
    "measured": Measured,
    "modelled": Modelled,
    "skipped": Skipped,
    "conditions": Conditions,
}


def to_line(record: Record) -> str:
    """One line of JSON, without the newline."""
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(record, cls))
    return json.dumps({"kind": kind, **dataclasses.asdict(record)})


def from_line(line: str) -> Record:
    """The record of a line.

    Raises:
        ValueError: for a line that is none, or one with fields of another kind.
    """
    try:
        fields = json.loads(line)
        cls = _KINDS[fields.pop("kind")]
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"no record of `bench`: {line[:60].strip()!r} ({error})") from None


def read(path: Path) -> list[Record]:
    """All records of a file that `--out` wrote.

    Raises:
        ValueError: for a line that is no record; the message has its number.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            records.append(from_line(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return records


def measured(records: Iterable[Record]) -> list[Measured]:
    """Only what was measured."""
    return [record for record in records if isinstance(record, Measured)]
