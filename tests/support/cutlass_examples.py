"""CUTLASS's Blackwell examples as programs that run on the machine, compiled with the nvcc of PyPI.

An example is NVIDIA's own host program with its own reference check. It is linked with the stand-in
for the CUDA runtime, and holds the PTX of its kernels uncompressed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jax_fp4._sim_costs import Costs, Timing
from support import stand_in
from support.native import compiler


@dataclass(frozen=True)
class Example:
    """Folder and file of an example, its chip, and a size with several tiles and blocks of k.

    Texts in `edits` are replaced before it is compiled.
    """

    folder: str
    file: str
    chip: str
    size: tuple[int, int, int]
    edits: tuple[tuple[str, str], ...] = ()


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
# What the cycle model likes better than what NVIDIA wrote: no cluster beyond the pair, and a small
# tile of the epilogue, which leaves shared memory for five stages instead of three.
TUNED = {
    "72a-tuned": dataclasses.replace(
        EXAMPLES["72a"],
        edits=(
            ("Shape<_2,_4,_1>", "Shape<_2,_1,_1>"),
            ("cutlass::epilogue::collective::EpilogueTileAuto", "Shape<_128,_32>"),
            (
                "cutlass::epilogue::collective::EpilogueScheduleAuto",
                "cutlass::epilogue::TmaWarpSpecialized2Sm",
            ),
        ),
    )
}


def _folder(module: str, inside: str) -> Path:
    """A folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / inside).exists():
            return Path(place) / inside
    raise FileNotFoundError(f"{module}/{inside} is not installed (extra `foreign`)")


def build(name: str, folder: Path) -> Path:
    """The program of an example, compiled into `folder`: one to five minutes."""
    example = (EXAMPLES | TUNED)[name]
    source = _folder("cutlass_library", "source")
    folders = ("include", "tools/util/include", "examples/common")
    target, library = folder / name, stand_in.path("libcudart.so")
    text = (source / "examples" / example.folder / f"{example.file}.cu").read_text()
    for old, new in example.edits:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    (folder / f"{name}.cu").write_text(text)
    architecture = f"arch=compute_{example.chip},code=compute_{example.chip}"
    subprocess.run(
        [
            _folder("nvidia", "cu13/bin/nvcc"), "-std=c++17", "-O1", "--expt-relaxed-constexpr",
            "-gencode", architecture, "-Xfatbin", "-compress-mode=none", "-cudart", "none",
            *(f"-I{source / part}" for part in folders),
            "-c", f"{target}.cu", "-o", f"{target}.o",
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


def modelled(program: Path, name: str, size: tuple[int, int, int]) -> Costs:
    """What the cycle model says of a program's product, M x N x K.

    It runs without data, so the program is stopped before it compares the output.
    """
    m, n, k = size
    read, write = os.pipe()
    machine = {
        "JAX_FP4_SIM_DEVICES": (EXAMPLES | TUNED)[name].chip,
        "JAX_FP4_SIM_COSTS": f"/dev/fd/{write}",
    }
    with subprocess.Popen(
        [str(program), f"--m={m}", f"--n={n}", f"--k={k}", "--iterations=0"],
        stdout=subprocess.DEVNULL, pass_fds=(write,), env=os.environ | machine,
    ) as process:  # fmt: skip
        os.close(write)
        with os.fdopen(read) as launches:
            first = launches.readline()
        process.kill()
    if not first:
        raise RuntimeError(f"{name} has launched nothing that could be modelled")
    launch = json.loads(first)
    return Costs(launch["counts"], Timing(**launch["timing"], intervals=[], ctas=[]))
