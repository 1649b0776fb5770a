"""Operands sharded over eight devices: bytes of one device, and collectives that move codes.

The checks are functions of support/sharding_checks.py, which runs in a process of its own, since
the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.repository import ROOT

CHECKS = [
    "quantize_gives_the_bytes_of_one_device",
    "dot_has_the_operands_of_one_device",
    "weights_are_gathered_in_four_bits",
    "family_agrees_with_one_device",
    "export_says_what_to_do",
    "compile_cache_hits_in_another_process",
]


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_sharded(kind: str) -> None:
    """Quantized operands are byte for byte those of one device, whatever the mesh; see CHECKS."""
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "sharding_checks.py"), kind],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes == {f"check_{check}": "" for check in CHECKS}
