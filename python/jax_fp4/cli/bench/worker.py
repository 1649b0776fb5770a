"""The process that measures: bound to its cores, it runs cases and prints records as JSON lines."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from jax_fp4.cli.bench import records, shapes

DEFAULT_SHAPES = {
    "gemm": "llama3-8b/out,llama3-8b/down,deepseek-v3-moe/expert_gate_up,decode/8b_out",
    "quantize": "llama3-8b/out,llama3-8b/down",
    "dot": "llama3-8b/out",
    "layer": "small",
}
"""By operation; these are all operations. Few enough for ten minutes on two cores."""

# Tokens on a CPU. Quantizing is fast beside products; a GPU takes all of them.
TOKENS = {"gemm": 64, "quantize": 1024, "dot": 64, "layer": 128}

_LEAST_ROWS_BACKWARD = 16  # nobody trains on one token, and a block along it would be empty


def cases(
    op: str, shape_list: str | None, tokens: int | None, gpu: bool
) -> list[tuple[str, Callable[[], Any]]]:
    """(label, function that makes the case) of an operation.

    Args:
        op: the operation.
        shape_list: as of ``--shapes``; None: the default.
        tokens: at most; None: the default.
        gpu: whether a GPU measures.

    Raises:
        ValueError: for a shape that is none.
    """
    from jax_fp4.cli.bench import dots, gemm, layers, quantizers

    text = DEFAULT_SHAPES[op] if shape_list is None else shape_list
    tokens = tokens or (shapes.TOKENS if gpu else TOKENS[op])
    if op == "layer":
        return [(b.label, lambda b=b: layers.layer(b)) for b in shapes.blocks(text, tokens)]
    found = shapes.products(text, tokens)
    if op == "gemm":
        return [(p.label, lambda p=p: gemm.gemm(p)) for p in found]
    if op == "quantize":  # the activations, of which several products may take the same
        matrices = dict.fromkeys((p.m, p.k, p.full_m) for p in found)
        return [(f"{m}x{k}", lambda x=(m, k, f): quantizers.quantize(*x)) for m, k, f in matrices]
    return [
        (p.label, lambda p=p, b=backward: dots.dot(p, b))
        for p in found
        for backward in ((False, True) if p.m >= _LEAST_ROWS_BACKWARD else (False,))
    ]


def measure(
    ops: list[str],
    shape_list: str | None,
    tokens: int | None,
    cores: int,
    seconds: float,
    rounds: int | None,
    progress: Callable[[str, float], None] = lambda text, part: None,
) -> Iterator[records.Record]:
    """Measures in this process.

    Args:
        ops: operations.
        shape_list: as of ``--shapes``.
        tokens: at most.
        cores: that this process has; 0: a GPU measures.
        seconds: for everything.
        rounds: exactly so many; None: as many as there is time for.
        progress: called with what is being measured and how much of all is done.

    Yields:
        Records, and first the conditions.
    """
    from jax_fp4.cli.bench import conditions
    from jax_fp4.cli.bench.measure import Probes, run_case

    probes = Probes(cores, conditions.cache_bytes())
    yield records.Conditions(
        {
            "measured on": "GPU" if cores == 0 else f"{cores} core{'s' if cores > 1 else ''}",
            "matmul ceiling": probes.matmul_name,
            "copy ceiling": probes.copy_name,
        }
    )
    # The first row of every operation, then the second ones: if time runs out, none has nothing.
    by_op = [[(op, *c) for c in cases(op, shape_list, tokens, cores == 0)] for op in ops]
    todo = [row for turn in itertools.zip_longest(*by_op) for row in turn if row is not None]
    begin = time.perf_counter()
    for number, (op, label, make) in enumerate(todo):
        name = f"{op} {label}"
        left = seconds - (time.perf_counter() - begin)
        if left <= 0 and rounds is None:
            yield records.Skipped(op, "", label, "all", "no time left of --minutes")
            continue

        def report(done: int, of: int, number: int = number, name: str = name) -> None:
            progress(f"{name}, round {done} of {of}", (number + done / of) / len(todo))

        progress(f"{name}, first calls", number / len(todo))
        yield from run_case(make(), probes, left / (len(todo) - number), rounds, report)


def run(cpus: list[int], spec: dict[str, Any]) -> int:
    """Prints everything that `measure` yields; the exit code.

    Args:
        cpus: that this process is bound to; empty: to none.
        spec: the arguments of `measure`.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)  # JAX starts its threads at its first computation

    def progress(text: str, part: float) -> None:
        print(json.dumps({"kind": "progress", "text": text, "part": part}), flush=True)

    try:
        for record in measure(**spec, progress=progress):
            print(records.to_line(record), flush=True)
    except KeyboardInterrupt:
        return 130
    return 0
