"""Records of `bench` that nobody measured, for tests of tables, reports and comparisons."""

import numpy as np

from jax_fp4.cli.bench.records import Measured, Modelled


def measured(
    peer: str,
    seconds: np.ndarray | list[float],
    cpu_seconds: np.ndarray | list[float] | None = None,
    *,
    ours: bool = False,
    shape: str = "64x256x512",
    op: str = "gemm",
    correct: bool = True,
) -> Measured:
    """A row with these samples; by default, processor time is the same as wall time."""
    samples = tuple(float(s) for s in seconds)
    processor = samples if cpu_seconds is None else tuple(float(s) for s in cpu_seconds)
    flops = 2.0 * 64 * 256 * 512
    return Measured(
        op, "", shape, peer, ours, 2, "GFLOP/s", flops / 1e9, flops, 1e5, samples, processor,
        tuple(1e11 for _ in samples), tuple(1e10 for _ in samples),
        "ok" if correct else "WRONG: off by 100%", correct,
    )  # fmt: skip


def modelled() -> Modelled:
    """A row of the cycle model whose figures are unmistakable."""
    return Modelled("gemm", "64x256x512", "theirs", "B200", 123e-6, 1e9, 4711, 1e6, 0.5, "a note")
