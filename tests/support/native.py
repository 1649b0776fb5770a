"""Shared libraries of the project's C++ code without Python bindings, for ctypes.

Tests reach csrc/ directly through small files of plain C functions (tests/*/*_c.cc), compiled with
the flags that matter to numbers in the package's own build. $CXX names another compiler.
"""

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from support.repository import ROOT

FLAGS = ("-std=c++20", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")


def compiler() -> list[str]:
    """The C++ compiler's command."""
    return shlex.split(os.environ.get("CXX", "c++"))


def shared_library(name: str, sources: Iterable[Path], *flags: str) -> ctypes.CDLL:
    """Compiles `sources` once per state of them and of all headers under csrc/, and loads it."""
    command = [*compiler(), *FLAGS, *flags, f"-I{ROOT / 'csrc'}", *map(str, sources)]
    digest = hashlib.sha256(shlex.join(command).encode())
    for path in (*sources, *sorted((ROOT / "csrc").rglob("*.h"))):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"jax_fp4_tests_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{name}_{digest.hexdigest()[:16]}.so"
    if not target.exists():
        # Several test processes may build at once: each under its own name, the last one stays.
        partial = target.with_suffix(f".{os.getpid()}")
        run = subprocess.run(
            [*command, "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{run.stderr}")
        partial.rename(target)
    return ctypes.CDLL(str(target))
