"""CUTLASS's Blackwell examples as programs that run on the machine, compiled with the nvcc of PyPI.

An example is NVIDIA's own host program with its own reference check. It is linked with the stand-in
for the CUDA runtime, and holds the PTX of its kernels uncompressed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support import stand_in
from support.native import compiler


@dataclass(frozen=True)
class Example:
    """Folder and file of an example, its chip, and a size with several tiles and blocks of k."""

    folder: str
    file: str
    chip: str
    size: tuple[int, int, int]


EXAMPLES = {
    "72a": Example(
        "72_blackwell_narrow_precision_gemm", "72a_blackwell_nvfp4_bf16_gemm", "100a",
        (768, 512, 1280),
    ),
    "72b": Example(
        "72_blackwell_narrow_precision_gemm", "72b_blackwell_nvfp4_nvfp4_gemm", "100a",
        (768, 512, 1280),
    ),
    "79a": Example(
        "79_blackwell_geforce_gemm", "79a_blackwell_geforce_nvfp4_bf16_gemm", "120a",
        (384, 256, 640),
    ),
    "79b": Example(
        "79_blackwell_geforce_gemm", "79b_blackwell_geforce_nvfp4_nvfp4_gemm", "120a",
        (384, 256, 640),
    ),
}  # fmt: skip


def _folder(module: str, inside: str) -> Path:
    """A folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / inside).exists():
            return Path(place) / inside
    raise FileNotFoundError(f"{module}/{inside} is not installed (extra `foreign`)")


def build(name: str, folder: Path) -> Path:
    """The program of an example, compiled into `folder`: one to five minutes."""
    example = EXAMPLES[name]
    source = _folder("cutlass_library", "source")
    folders = ("include", "tools/util/include", "examples/common")
    target, library = folder / name, stand_in.path("libcudart.so")
    architecture = f"arch=compute_{example.chip},code=compute_{example.chip}"
    subprocess.run(
        [
            _folder("nvidia", "cu13/bin/nvcc"), "-std=c++17", "-O1", "--expt-relaxed-constexpr",
            "-gencode", architecture, "-Xfatbin", "-compress-mode=none", "-cudart", "none",
            *(f"-I{source / part}" for part in folders),
            "-c", source / "examples" / example.folder / f"{example.file}.cu",
            "-o", f"{target}.o",
        ],
        check=True,
    )  # fmt: skip
    subprocess.run(
        [*compiler(), f"{target}.o", library, f"-Wl,-rpath,{library.parent}", "-o", target],
        check=True,
    )
    return target


def run(program: Path, name: str, seed: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of `build` with one schedule; it compares every output with its reference."""
    m, n, k = EXAMPLES[name].size
    machine = {"JAX_FP4_SIM_DEVICES": EXAMPLES[name].chip, "JAX_FP4_SIM_SEED": str(seed)}
    return subprocess.run(
        [str(program), f"--m={m}", f"--n={n}", f"--k={k}", "--iterations=0"],
        capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | machine | variables,
    )  # fmt: skip
