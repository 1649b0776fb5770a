"""Where and how a run is measured: recorded with every run, since no figure means much without."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "numpy", "qwix", "torch", "transformer_engine")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def available_memory() -> float:
    """Bytes that a process can have now; 8 GiB where the system does not say."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    return float(found[1]) * 1024 if found else 8.0 * 2**30


def cache_bytes() -> int:
    """Of the last-level cache of processor 0; 32 MiB where the system does not say."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])", _read(str(index)))
        if found:
            sizes.append(int(found[1]) << (10 if found[2] == "K" else 20))
    return max(sizes, default=32 << 20)


def _clocks() -> str:
    """Of the processors, now."""
    clocks = [float(f) for f in re.findall(r"cpu MHz\s*:\s*([\d.]+)", _read("/proc/cpuinfo"))]
    return f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else "unknown"


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.strip().splitlines()


def versions() -> dict[str, str]:
    """Of the package, what it needs, and the peers that are installed."""
    import jax_fp4

    found = {"jax_fp4": jax_fp4.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def gather() -> dict[str, Any]:
    """Everything, as it goes into the record."""
    import jax_fp4

    model = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return {
        "command": "python -m jax_fp4 " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "cores": cores,
        "last-level cache": f"{cache_bytes() / 2**20:g} MiB",
        "clocks at the start": _clocks(),
        "load at the start": " ".join(f"{x:.1f}" for x in load),
        "memory available": f"{available_memory() / 2**30:.1f} GiB",
        "CPU level": jax_fp4.cpu_level(),
        "GPU, driver, clocks, power limit": "; ".join(_gpus()) or "none",
        "platform": platform.platform(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "inputs": "standard normal, bfloat16; activations new in every sample",
        "samples": "one call each, peers in turn, caches overwritten before each",
    }
