"""Compiles the kernels of csrc/kernels/variants.def: NVRTC -> PTX -> ptxas -> images and a report.

Runs as a build step of CMakeLists.txt, and by itself:

    python csrc/compile/compile_kernels.py --out build/kernels [--archs 100a,103a] [--jobs 2]

Needs no CUDA toolkit, no nvcc and no GPU: NVRTC and ptxas come from the PyPI packages
nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvcc-cu12, release 12.9, and nothing else on the machine is
looked at. Writes into the output folder:

    images.bin, images.cc   every PTX and cubin, and the table that csrc/compile/images.h declares
    report.json, report.txt registers, spills, stack and shared memory of every kernel and chip
    cache/                  results by content: what has not changed is not compiled again

Refuses chips that it does not know, PTX that leaves rounding open, and kernels that spill.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1]
RELEASE = (12, 9)  # PTX ISA 8.8: family targets, sm_103 and sm_121
# The chip of a cubin -> the target of the PTX it is made of. PTX for a family (f) runs on all its
# chips; a cubin runs on one (a), or on later chips of its major version (80 on 86 and 89).
ARCHS = {"100a": "100f", "103a": "100f", "120a": "120f", "121a": "120f", "90": "90", "80": "80"}
# The column `targets` of variants.def.
TARGETS = {
    "every_gpu": ("100f", "120f", "90", "80"),
    "datacenter": ("100f",),
    "consumer": ("120f",),
    "older": ("90", "80"),
}
# NVRTC and ptxas take below 1 GiB each for the largest of our kernels.
_JOB_BYTES = 3 << 29

_KERNEL_ROW = re.compile(r'^KERNEL\((\w+),\s*"([\w/.]+)",\s*"([^"]*)",\s*(\w+)\)', re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# ptxas may contract these into an fma, and then the device rounds once where the PTX machine and
# the CPU round twice. Flushing subnormals would change scales.
_OPEN_ROUNDING = re.compile(r"\b(?:add|sub|mul)(?:\.ftz)?(?:\.sat)?\.f32(?:x2)?\b|\.ftz\b")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """The build cannot go on; the text says why and what to do."""


class ToolsMissing(CompileError):
    """NVRTC or ptxas of the right release is not installed."""


@dataclass(frozen=True)
class Kernel:
    """A row of variants.def."""

    name: str  # of the entry
    source: str  # below csrc/kernels
    defines: tuple[str, ...]
    targets: tuple[str, ...]  # of PTX


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel on one chip."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    cubin_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A kernel for one PTX target: its PTX, and (cubin, resources) for each chip."""

    ptx: str
    cubins: dict[str, tuple[bytes, Resources]]


# ---- What is to be compiled ----------------------------------------------------------------------


def kernels(path: Path = CSRC / "kernels" / "variants.def") -> list[Kernel]:
    """The rows of variants.def, in order."""
    rows = []
    for name, source, defines, targets in _KERNEL_ROW.findall(path.read_text()):
        if targets not in TARGETS:
            raise CompileError(f"{path}: {name}: targets {targets!r} is none of {sorted(TARGETS)}")
        rows.append(Kernel(name, source, tuple(defines.split()), TARGETS[targets]))
    names = [row.name for row in rows]
    if len(names) != len(set(names)):
        raise CompileError(f"{path}: a kernel name occurs twice")
    return rows


def parse_archs(text: str) -> list[str]:
    """The chips of a list such as "100a,sm_103a" or "10.0a;8.0"; "all" names every one we know.

    Raises:
        CompileError: names every entry that is not one of them, and never drops one.
    """
    if text.strip().lower() in ("", "all"):
        return list(ARCHS)
    entries = [entry for entry in re.split(r"[,;\s]+", text.strip()) if entry]
    wanted, wrong = [], []
    for entry in entries:
        arch = entry.lower().removeprefix("sm_").replace(".", "")
        if arch in ARCHS:
            wanted.append(arch)
        elif arch.rstrip("af") + "a" in ARCHS:
            chip = arch.rstrip("af") + "a"
            wrong.append(f"{entry} (has no FP4 instructions as such a target; write {chip})")
        else:
            wrong.append(entry)
    if wrong:
        raise CompileError(
            f"archs: not a chip that kernels are compiled for: {', '.join(wrong)}; "
            f"expected some of {', '.join(ARCHS)}"
        )
    return [arch for arch in ARCHS if arch in wanted]


def source_text(kernel: Kernel) -> str:
    """The source and everything of csrc/ that it includes: what a build depends on."""
    seen: dict[Path, str] = {}

    def visit(path: Path) -> None:
        if path in seen:
            return
        seen[path] = path.read_text()
        for name in _INCLUDE.findall(seen[path]):
            candidates = [path.parent / name, CSRC / name]
            target = next((c.resolve() for c in candidates if c.is_file()), None)
            if target is None:
                raise CompileError(f'{path}: includes "{name}", which is no file of csrc/')
            visit(target)

    visit(CSRC / "kernels" / kernel.source)
    return "\n".join(f"{p.relative_to(CSRC)}\n{text}" for p, text in seen.items())


# ---- Tools ---------------------------------------------------------------------------------------


def _package_file(pattern: str, package: str) -> Path:
    namespace = importlib.util.find_spec("nvidia")
    for folder in list(namespace.submodule_search_locations or []) if namespace else []:
        for path in sorted(Path(folder).glob(pattern)):
            return path
    release = ".".join(map(str, RELEASE))
    raise ToolsMissing(
        f"nvidia/{pattern} is not installed in the environment of {sys.executable}; "
        f"pip install '{package}=={release}.*'"
    )


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    path = _package_file("cuda_nvrtc/lib/libnvrtc.so.12", "nvidia-cuda-nvrtc-cu12")
    # NVRTC opens its built-ins by name, from its own folder; under AddressSanitizer that search
    # fails, so they are loaded before.
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(path))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != RELEASE:
        raise ToolsMissing(f"{path} has release {major.value}.{minor.value}, expected 12.9")
    return library


@functools.cache
def _ptxas() -> Path:
    path = _package_file("cuda_nvcc/bin/ptxas", "nvidia-cuda-nvcc-cu12")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    if f"release {RELEASE[0]}.{RELEASE[1]}," not in version:
        raise ToolsMissing(f"{path} is not of release 12.9: {version.strip()}")
    return path


def check_tools() -> None:
    """Raises ToolsMissing unless both compilers are there, in the right release."""
    _nvrtc()
    _ptxas()


# ---- One kernel ----------------------------------------------------------------------------------


def nvrtc_options(kernel: Kernel, target: str) -> list[str]:
    """How every kernel is compiled to PTX."""
    return [
        "--std=c++20",
        "--fmad=false",  # a fused product is written as fma
        f"--gpu-architecture=sm_{target}",
        f"--include-path={CSRC}",
        f"--define-macro=JAX_FP4_KERNEL={kernel.name}",
        *(f"--define-macro={define}" for define in kernel.defines),
    ]


def compile_ptx(kernel: Kernel, target: str, text: str | None = None) -> str:
    """The PTX of a kernel for a target such as "100f".

    Args:
        kernel: a row of variants.def.
        target: one of its PTX targets.
        text: in place of the source file's, for tests that plant a fault.
    """
    nvrtc = _nvrtc()
    source = text if text is not None else (CSRC / "kernels" / kernel.source).read_text()
    options = [option.encode() for option in nvrtc_options(kernel, target)]
    program = ctypes.c_void_p()
    name = kernel.source.encode()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None)
    if status:
        raise CompileError(f"{kernel.name}: NVRTC refuses to start (status {status})")

    def fetch(what: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.value.decode()

    try:
        if nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        ):
            raise CompileError(f"{kernel.name} for sm_{target}:\n{fetch('ProgramLog')}")
        return fetch("PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def check_rounding(name: str, ptx: str) -> None:
    """Raises CompileError where PTX leaves rounding to ptxas, or flushes subnormals."""
    for number, line in enumerate(ptx.splitlines(), 1):
        code = line.split("//")[0]
        if _OPEN_ROUNDING.search(code):
            raise CompileError(
                f"{name}: PTX line {number}: {code.strip()!r} has no rounding modifier or flushes "
                "subnormals, so that devices could round differently from the PTX; compile with "
                "--fmad=false and without fast-math"
            )


def assemble(name: str, ptx: str, arch: str) -> tuple[bytes, Resources]:
    """The cubin of PTX text for a chip, and its resources; spills are refused."""
    with tempfile.TemporaryDirectory() as folder:
        # Fixed names: a cubin must not depend on where it was built.
        (Path(folder) / "kernel.ptx").write_text(ptx)
        run = subprocess.run(
            [str(_ptxas()), f"-arch=sm_{arch}", "-O3", "-v", "kernel.ptx", "-o", "kernel.cubin"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        log = run.stdout + run.stderr
        if run.returncode < 0:
            raise CompileError(
                f"{name}: ptxas for sm_{arch} was killed by signal {-run.returncode}, probably for "
                "want of memory; build with fewer jobs (MAX_JOBS=1)"
            )
        if run.returncode:
            raise CompileError(f"{name}: ptxas for sm_{arch}:\n{log}")
        cubin = (Path(folder) / "kernel.cubin").read_bytes()
    spills, used, shared = _SPILLS.search(log), _USED.search(log), _SHARED.search(log)
    if spills is None or used is None:
        raise CompileError(f"{name}: ptxas for sm_{arch} says nothing about registers:\n{log}")
    stack, stores, loads = map(int, spills.groups())
    resources = Resources(
        name,
        arch,
        registers=int(used.group(1)),
        spill_bytes=stores + loads,
        stack_bytes=stack,
        shared_bytes=int(shared.group(1)) if shared else 0,
        cubin_bytes=len(cubin),
    )
    if resources.spill_bytes:
        raise CompileError(
            f"{name} on sm_{arch} spills {stores} + {loads} bytes with {resources.registers} "
            "registers; give it fewer threads, a smaller tile or looser launch bounds"
        )
    return cubin, resources


def compile_kernel(kernel: Kernel, target: str, archs: Sequence[str]) -> Compiled:
    """Everything of one kernel for one PTX target."""
    ptx = compile_ptx(kernel, target)
    check_rounding(f"{kernel.name} for sm_{target}", ptx)
    return Compiled(ptx, {arch: assemble(kernel.name, ptx, arch) for arch in archs})


def _compile_cached(job: tuple[Kernel, str, tuple[str, ...], Path]) -> Compiled:
    kernel, target, archs, cache = job
    # The include path is left out, and with it where the project lies.
    options = [o for o in nvrtc_options(kernel, target) if not o.startswith("--include-path")]
    key = json.dumps([options, archs, RELEASE, Path(__file__).read_text(), source_text(kernel)])
    stem = cache / f"{kernel.name}.{target}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    record = stem.with_name(stem.name + ".json")
    if record.exists():
        resources = {r["arch"]: Resources(**r) for r in json.loads(record.read_text())}
        cubins = {a: Path(f"{stem}.{a}.cubin").read_bytes() for a in archs}
        return Compiled(
            Path(f"{stem}.ptx").read_text(), {a: (cubins[a], resources[a]) for a in archs}
        )
    compiled = compile_kernel(kernel, target, archs)
    for stale in cache.glob(f"{kernel.name}.{target}.*"):
        stale.unlink(missing_ok=True)
    Path(f"{stem}.ptx").write_text(compiled.ptx)
    for arch, (cubin, _) in compiled.cubins.items():
        Path(f"{stem}.{arch}.cubin").write_bytes(cubin)
    # Last: an interrupted build compiles again.
    record.write_text(json.dumps([asdict(r) for _, r in compiled.cubins.values()]))
    return compiled


# ---- The whole build -----------------------------------------------------------------------------


def default_jobs() -> int:
    """As many as processors, memory, and MAX_JOBS or CMAKE_BUILD_PARALLEL_LEVEL allow."""
    for name in ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL"):
        if os.environ.get(name, "").isdigit():
            return max(1, int(os.environ[name]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _JOB_BYTES))


def build(out: Path, archs: Sequence[str], jobs: int, rows: Iterable[Kernel]) -> list[Resources]:
    """Compiles `rows` for `archs` and writes images and report into `out`."""
    cache = out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    work = []
    for kernel in rows:
        for target in kernel.targets:
            chips = tuple(arch for arch in archs if ARCHS[arch] == target)
            if chips:
                work.append((kernel, target, chips, cache))
    try:
        with ProcessPoolExecutor(max_workers=jobs) as pool:
            results = list(pool.map(_compile_cached, work))
    except BrokenProcessPool:
        raise CompileError(
            f"a compiler process was killed, probably for want of memory, with {jobs} jobs; "
            "build with fewer (MAX_JOBS=1)"
        ) from None
    images: list[tuple[str, str, str, bytes]] = []
    resources = []
    for (kernel, target, _, _), compiled in zip(work, results, strict=True):
        # PTX ends with a NUL, as the driver wants it.
        images.append((kernel.name, target, "ptx", compiled.ptx.encode() + b"\0"))
        for arch, (cubin, used) in compiled.cubins.items():
            images.append((kernel.name, arch, "cubin", cubin))
            resources.append(used)
    _write_images(out, images)
    _write_report(out, resources)
    return resources


def _write_images(out: Path, images: list[tuple[str, str, str, bytes]]) -> None:
    blob = bytearray()
    table = []
    for name, target, kind, data in images:
        blob += b"\0" * (-len(blob) % 64)
        table.append(f'    {{"{name}", "{target}", ImageKind::{kind}, {len(blob)}, {len(data)}}},')
        blob += data
    _write_if_changed(out / "images.bin", bytes(blob))
    digest = hashlib.sha256(blob).hexdigest()
    text = "\n".join(
        [
            f"// Generated by compile_kernels.py. images.bin: sha256 {digest}",
            '#include "compile/images.h"',
            "",
            'asm(".pushsection .rodata\\n"',
            '    ".balign 64\\n"',
            '    ".hidden jax_fp4_images_begin\\n"',
            '    ".globl jax_fp4_images_begin\\n"',
            '    "jax_fp4_images_begin:\\n"',
            f'    ".incbin \\"{(out / "images.bin").resolve()}\\"\\n"',
            '    ".byte 0\\n"',
            '    ".popsection\\n");',
            'extern "C" const unsigned char jax_fp4_images_begin[];',
            "",
            "namespace jax_fp4 {",
            "namespace {",
            "constexpr ImageEntry kImages[] = {",
            *table,
            "    {nullptr, nullptr, ImageKind::ptx, 0, 0}};",
            "}  // namespace",
            f"ImageTable images() {{ return {{kImages, {len(table)}, jax_fp4_images_begin}}; }}",
            "}  // namespace jax_fp4",
            "",
        ]
    )
    _write_if_changed(out / "images.cc", text.encode())


def _write_report(out: Path, resources: list[Resources]) -> None:
    rows = [asdict(r) for r in resources]
    _write_if_changed(out / "report.json", (json.dumps(rows, indent=1) + "\n").encode())
    columns = list(Resources.__dataclass_fields__)
    widths = [max(len(c), *(len(str(r[c])) for r in rows), 0) if rows else len(c) for c in columns]
    lines = ["  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True))]
    lines += [
        "  ".join(str(r[c]).ljust(w) for c, w in zip(columns, widths, strict=True)) for r in rows
    ]
    _write_if_changed(out / "report.txt", ("\n".join(s.rstrip() for s in lines) + "\n").encode())


def _write_if_changed(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)


def main(arguments: Sequence[str]) -> int:
    """The command line; 3 if the tools are missing, 1 for every other error."""
    parser = argparse.ArgumentParser(description="Compiles the kernels of variants.def.")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--archs", default="all", help=f"chips: all, or some of {', '.join(ARCHS)}")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="compilers at a time")
    parser.add_argument("--only", default="", help="kernels whose name matches this pattern")
    parser.add_argument("--check", action="store_true", help="only see whether a build can start")
    options = parser.parse_args(arguments)
    try:
        archs = parse_archs(options.archs)
        check_tools()
        if options.check:
            return 0
        if options.out is None:
            parser.error("--out is needed")
        rows = [k for k in kernels() if re.search(options.only, k.name)]
        resources = build(options.out, archs, max(1, options.jobs), rows)
    except CompileError as error:
        print(f"compile_kernels: {error}", file=sys.stderr)
        return 3 if isinstance(error, ToolsMissing) else 1
    registers = max((r.registers for r in resources), default=0)
    print(f"{len(resources)} cubins for {', '.join(archs)}; at most {registers} registers")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
