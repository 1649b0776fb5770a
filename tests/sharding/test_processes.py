"""Several processes under `jax.distributed` train as one process with as many devices does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.repository import ROOT

PROGRAM = ROOT / "tests" / "support" / "processes_run.py"


def run(count: int, devices: int, layers: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """What each of ``count`` processes wrote, each with so many devices."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, (port, count, number, layers, folder))],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    errors = [process.communicate()[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-6000:]
    written = []
    for number in range(count):
        with np.load(folder / f"{number}.npz") as file:
            written.append(dict(file))
    return written


def operands(written: list[dict[str, np.ndarray]]) -> dict[int, np.ndarray]:
    """The quantized operands, put together from the shards of all processes."""
    whole: dict[int, np.ndarray] = {}
    for arrays in written:
        for name, shard in arrays.items():
            if found := re.fullmatch(r"(\d+) at \[(.*)\]", name):
                number, begins = int(found[1]), [int(i) for i in found[2].split(",")]
                shape = tuple(arrays[f"shape {number}"])
                array = whole.setdefault(number, np.full(shape, 255).astype(shard.dtype))
                where = (slice(b, b + n) for b, n in zip(begins, shard.shape, strict=True))
                array[tuple(where)] = shard
    return whole


@pytest.mark.parametrize(
    ("count", "layers"),
    [(2, 1), *(pytest.param(count, 3, marks=pytest.mark.slow) for count in (2, 4))],
)
def test_processes_train_as_one(count: int, layers: int, tmp_path: Path) -> None:
    """Operand bytes of the first step are those of one device; losses are those of one process.

    Two processes shard weights and tokens alike (FSDP), four also the other dimension of weights.
    """
    (alone,) = run(1, count, layers, tmp_path / "alone")
    together = run(count, 1, layers, tmp_path / "together")
    wanted = [alone[f"one device {i}"] for i in range(18)]  # six operands of three arrays
    assert f"one device {len(wanted)}" not in alone
    for shards in ([alone], together):
        found = operands(shards)
        assert sorted(found) == list(range(len(wanted)))
        for i, array in enumerate(wanted):
            assert found[i].dtype == array.dtype and found[i].tobytes() == array.tobytes(), i
    assert alone["losses"].shape == (20,) and alone["losses"][-1] < 0.75 * alone["losses"][0]
    for arrays in together:
        np.testing.assert_allclose(arrays["losses"], alone["losses"], rtol=1e-5)
