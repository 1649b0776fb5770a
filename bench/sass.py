"""Machine instructions per element of the quantizer, along the path that full tiles take.

    python bench/sass.py [--nvdisasm PATH] [--listing FILE]

ptxas notes the PTX line that an instruction comes from, and the PTX machine how many warps ran that
line. A basic block of machine code ran as often as most of its lines; blocks that call the slow
path of a division, and that path itself, are left out. nvdisasm is part of the CUDA toolkit, and
of the Triton package.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import device_kernels
from support.cpu_quantize import Options

SIZE = 256  # rows and columns: whole tiles only
CASES = {
    "nearest": ({}, {}),
    "nearest, linear scales": ({"tiled_layout": False}, {"tiled_layout": False}),
    "2-D scales": ({"tiles": True}, {"tiles": True}),
    "stochastic": ({"stochastic": True}, {"stochastic": True}),
    "Hadamard on the column copy": ({}, {"hadamard": True}),
    "stochastic, Hadamard on the column copy": (
        {"stochastic": True},
        {"stochastic": True, "hadamard": True},
    ),
}

_LINE = re.compile(r'^\s*//## File ".nv_debug_ptx_txt", line (\d+)')
_LABEL = re.compile(r"^(\.L_\w+):")
_CODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);")
# Control leaves a block here; a barrier does not.
_ENDS = re.compile(r"\b(BRA|EXIT|RET|CALL|BRX)\b")


class Block:
    """A basic block: (text, PTX line) of its instructions."""

    def __init__(self) -> None:
        self.code: list[tuple[str, int]] = []

    def warps(self, by_line: dict[int, int]) -> int:
        """How many warps ran it, as most of its lines say."""
        if any(re.search(r"\bCALL\b", text) for text, _ in self.code):
            return 0
        votes = Counter(by_line.get(line, 0) for _, line in self.code if line)
        return votes.most_common(1)[0][0] if votes else 0


def blocks_of(listing: str) -> list[Block]:
    """The basic blocks of a kernel, without the functions that it calls."""
    blocks, line = [Block()], 0
    for text in listing.splitlines():
        if "$__internal" in text and text.rstrip().endswith(":"):
            break
        if match := _LINE.match(text):
            line = int(match[1])
        elif _LABEL.match(text):
            blocks.append(Block())
        elif match := _CODE.match(text):
            blocks[-1].code.append((match[1], line))
            if _ENDS.search(match[1]):
                blocks.append(Block())
    return blocks


def disassemble(name: str, arch: str, nvdisasm: str) -> str:
    """The listing of a kernel, with PTX lines."""
    compiler = device_kernels.compiler()
    ptx = device_kernels.ptx(name, compiler.ARCHS[arch])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        subprocess.run(
            [
                compiler._ptxas(),
                f"-arch=sm_{arch}",
                "-O3",
                "-lineinfo",
                "kernel.ptx",
                "-o",
                "cubin",
            ],
            cwd=folder,
            check=True,
        )
        run = subprocess.run(
            [nvdisasm, "-c", "-gp", "cubin"], cwd=folder, check=True, capture_output=True, text=True
        )
    return run.stdout


def find_nvdisasm() -> str | None:
    """nvdisasm of the path, or of Triton."""
    if found := shutil.which("nvdisasm"):
        return found
    spec = importlib.util.find_spec("triton")
    for folder in list(spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("backends/nvidia/bin/nvdisasm"):
            return str(path)
    return None


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvdisasm", default=find_nvdisasm())
    parser.add_argument("--kernel", default="quantize_nvfp4_16")
    parser.add_argument("--arch", default="100a")
    parser.add_argument("--cases", default="")
    parser.add_argument("--listing", type=Path, help="write the listing of the first case here")
    options = parser.parse_args()
    if options.nvdisasm is None:
        parser.error("nvdisasm is not found; name it with --nvdisasm")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, SIZE, SIZE)).astype(np.float32)
    if options.kernel.endswith("16"):
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    blocks = blocks_of(disassemble(options.kernel, options.arch, options.nvdisasm))
    for name, kinds in CASES.items():
        if not re.search(options.cases, name):
            continue
        device = device_kernels.Device(options.arch)
        copies = [
            Options(format="NVFP4", axis=axis, **{"tiled_layout": True, **kind})
            for axis, kind in zip((1, 0), kinds, strict=True)
        ]
        device_kernels.quantize(device, x, *copies)
        by_line = device.reports[-1][1].by_line
        run = [(block.warps(by_line), block) for block in blocks]
        issued = sum(warps * len(block.code) for warps, block in run)
        print(f"{name:44} {issued * 32 / x.size:6.2f}")
        if options.listing:
            options.listing.write_text(
                "\n\n".join(
                    "\n".join([f"{warps} warps", *(f"  {line:5} {t}" for t, line in block.code)])
                    for warps, block in run
                )
            )
            options.listing = None


if __name__ == "__main__":
    main()
