"""Results of bench/convergence.py: what a file must hold, and losses and gaps of all of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

FINAL_STEPS = 500  # a final loss is the mean over these; the learning rate is then near its lowest
_SETTING = ("steps", "averaged_steps", "validation_tokens", "model", "text")
_KEYS = {"name", "bug", "seed", "steps_done", "losses", "validation_loss", "conditions", *_SETTING}


class ResultError(ValueError):
    """A result file is not what it should be; the message says what to do."""


def file_name(name: str, seed: int) -> str:
    """Of a run's result."""
    return f"{name}-seed{seed}.json"


def check(path: Path, result: Any) -> None:
    """Refuses what cannot be the result of a run.

    Args:
        path: of the file.
        result: what it holds.

    Raises:
        ResultError: it names the entry, what was expected and what came.
    """

    def fail(entry: str, expected: str, got: Any) -> None:
        raise ResultError(
            f"{path.name}: {entry} must be {expected}, got {got}; delete the file and run it again"
        )

    if not isinstance(result, dict) or result.keys() != _KEYS:
        keys = sorted(result) if isinstance(result, dict) else type(result).__name__
        fail("its keys", ", ".join(sorted(_KEYS)), keys)
    wanted = file_name(result["name"], result["seed"])
    if path.name != wanted:
        fail("the file's name", f"{wanted}, after its name and seed", path.name)
    done, averaged = result["steps_done"], result["averaged_steps"]
    if not averaged <= done <= result["steps"]:
        fail("steps_done", f"from {averaged} to {result['steps']}", done)
    if result["bug"] is None and done != result["steps"]:
        fail("steps_done", f"{result['steps']} in a run without a planted bug", done)
    if len(result["losses"]) != done // averaged:
        fail("losses", f"{done // averaged} means of {averaged} steps", len(result["losses"]))
    for entry in ("losses", "validation_loss"):
        values = np.asarray(result[entry], np.float64)
        if not (np.isfinite(values) & (values > 0)).all():
            fail(entry, "positive and finite", values[~(np.isfinite(values) & (values > 0))])


@dataclasses.dataclass(frozen=True)
class Results:
    """All runs, of one setting.

    Attributes:
        runs: what each file holds, by name and seed.
    """

    runs: dict[tuple[str, int], dict[str, Any]]

    def losses(self, name: str, seed: int) -> np.ndarray | None:
        """The curve, a point for ``averaged_steps`` steps; None without such a run."""
        run = self.runs.get((name, seed))
        return None if run is None else np.asarray(run["losses"])

    def gaps(self, name: str, seed: int, baseline: str) -> np.ndarray | None:
        """Loss minus that of the baseline of the same seed, in nats, at every point both have."""
        mine, other = self.losses(name, seed), self.losses(baseline, seed)
        if mine is None or other is None or name == baseline:
            return None
        length = min(len(mine), len(other))
        return mine[:length] - other[:length]

    def seeds(self, name: str) -> list[int]:
        """With a result, ascending."""
        return sorted(seed for other, seed in self.runs if other == name)

    def final_points(self) -> int:
        """Points of the curve that a final loss is the mean of."""
        return math.ceil(FINAL_STEPS / next(iter(self.runs.values()))["averaged_steps"])

    def final_loss(self, name: str, seed: int) -> float:
        """Training loss at the end of a run."""
        return float(np.mean(self.losses(name, seed)[-self.final_points() :]))


def read(folder: Path) -> Results:
    """Reads every result in the folder.

    Raises:
        ResultError: there is none, one is wrong, or they are not of one setting.
    """
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    first: tuple[Path, dict[str, Any]] | None = None
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise ResultError(f"{path.name} is no JSON ({error}); delete it") from None
        check(path, result)
        first = first or (path, result)
        for entry in _SETTING:
            if result[entry] != first[1][entry]:
                raise ResultError(
                    f"{path.name} and {first[0].name} differ in {entry} ({result[entry]} and "
                    f"{first[1][entry]}): they cannot be compared; name a folder for each setting "
                    "with --results"
                )
        runs[result["name"], result["seed"]] = result
    if not runs:
        raise ResultError(f"{folder} holds no result; start with `run` or `all`")
    return Results(runs)
