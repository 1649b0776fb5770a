"""Reading and converting need memory for a tensor, not for a checkpoint. Linux only: /proc."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.checkpoints import write_raw

# A process of its own: what it needs beyond its libraries, which have run once before.
PROGRAM = """
import sys
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np
import jax_fp4 as fp4
from jax_fp4 import checkpoint
from jax_fp4.cli import main
from jax_fp4.convert import quantizing

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(l for l in lines if l.startswith("VmHWM")).split()[1])

quantizing.quantize_rows(np.ones((64, 64), np.float32), fp4.NVFP4, "nearest", 1.0, "modelopt")
before = peak()
if sys.argv[1] == "convert":
    assert main(sys.argv[1:]) == 0
else:
    with checkpoint.Checkpoint(sys.argv[2]) as opened:
        checkpoint.save(sys.argv[3], opened)
print("PEAK", peak() - before)
"""


def peak_of(*arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split("PEAK")[1])


def write_model(path: Path, tensors: int, rows: int) -> int:
    """Random bf16 matrices [rows, 4096]; bytes of one of them."""
    data = np.random.default_rng(0).integers(0, 2**16, rows * 4096, np.uint16)
    data &= 0xBFFF  # exponents below 2: no NaN, no Inf
    write_raw(
        path, {f"w{i}.weight": ("BF16", (rows, 4096), data.tobytes()) for i in range(tensors)}
    )
    return data.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("to", ["nvfp4", "mxfp8"])
def test_a_conversion_needs_no_more_than_a_tensor(tmp_path: Path, to: str) -> None:
    """A checkpoint of 1 GB in tensors of 128 MiB: at most one of them and a tenth."""
    largest = write_model(tmp_path / "in.safetensors", 8, 1 << 14)
    arguments = (str(tmp_path / "in.safetensors"), str(tmp_path / "out"), "--to", to)
    assert peak_of("convert", *arguments) <= 1.1 * largest
    report = json.loads((tmp_path / "out" / "convert_report.json").read_text())
    print(f"{report['gigabytes_per_second']:.3f} GB/s of bf16", report["conditions"])


@pytest.mark.slow
def test_a_copy_needs_no_more_than_a_tensor(tmp_path: Path) -> None:
    """A quantized checkpoint of 0.5 GB, read and written a tensor at a time."""
    codes = np.random.default_rng(0).integers(0, 0x70, 1 << 26, np.uint8).tobytes()
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for i in range(8):
        tensors[f"w{i}.weight"] = ("F8_E4M3", (1 << 14, 4096), codes)
        tensors[f"w{i}.weight_scale"] = ("U8", (1 << 14, 128), codes[: 1 << 21])
    path = write_raw(tmp_path / "in.safetensors", tensors)
    copy = tmp_path / "copy.safetensors"
    assert peak_of("copy", str(path), str(copy)) <= 1.1 * len(codes)
    assert copy.read_bytes() == path.read_bytes()
