"""Trains MaxText models in this process and says what happened; a program for test_maxtext.py.

    python maxtext_run.py '{"rules": {...} or null, "runs": [[argument, ...], ...]}'

With "process": {"address": ..., "count": ..., "rank": ...} it is one of several that train
together.

The last line it prints is JSON: for each run its losses, and how often a product of each format was
executed, counted by a callback in the compiled train step.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
import re
import sys
from typing import Any

import jax

import jax_fp4.integrations.maxtext as fp4_maxtext
import jax_fp4.product
import jax_fp4.ragged
from jax_fp4.integrations import LayerRules

EXECUTED: collections.Counter[str] = collections.Counter()
_STEP = re.compile(r"completed step: (\d+),.*? loss: ([\d.]+)")


def counting(multiply: Any) -> Any:
    """``multiply`` that leaves a mark whenever the program runs it."""

    def bump(name: str) -> None:
        EXECUTED[name] += 1

    @functools.wraps(multiply)
    def counted(a: Any, *args: Any, **keywords: Any) -> Any:
        jax.debug.callback(functools.partial(bump, a.format.name))
        return multiply(a, *args, **keywords)

    return counted


class Losses(logging.Handler):
    """The losses that MaxText logs."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if found := _STEP.search(record.getMessage()):
            assert int(found[1]) == len(self.values)
            self.values.append(float(found[2]))


def main() -> None:
    task = json.loads(sys.argv[1])
    if process := task.get("process"):
        jax.distributed.initialize(process["address"], process["count"], process["rank"])
    from absl import app
    from maxtext.trainers.pre_train import train

    fp4_maxtext.use(None if task["rules"] is None else LayerRules(**task["rules"]))
    jax_fp4.product.multiply = counting(jax_fp4.product.multiply)
    jax_fp4.ragged.multiply_groups = counting(jax_fp4.ragged.multiply_groups)

    def runs(_: Any) -> None:
        results = []
        for arguments in task["runs"]:
            losses = Losses()
            logging.getLogger("absl").addHandler(losses)
            EXECUTED.clear()
            train.main(["train", *arguments])
            jax.effects_barrier()
            logging.getLogger("absl").removeHandler(losses)
            results.append({"losses": losses.values, "executed": dict(EXECUTED)})
        print(json.dumps(results))

    app.run(runs, argv=sys.argv[:1])


if __name__ == "__main__":
    main()
