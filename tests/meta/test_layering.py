"""Which folder may include which: docs/design.md draws the arrows, these tests keep them.

The layers among Python modules are import-linter's job (`make lint`); here are the C++ arrows, and
the few Python rules that import-linter cannot see.
"""

import re
import sys
from pathlib import Path

import pytest

from support.repository import ROOT, imported_modules

# (folder, what it may include): a folder or one header of csrc/. Every folder may include itself.
CXX_ARROWS = {
    ("cpu", "numerics"),
    ("driver", "compile/images.h"),
    ("driver", "plan"),
    ("ffi", "compile/images.h"),
    ("ffi", "cpu"),
    ("ffi", "driver"),
    ("ffi", "numerics"),
    ("ffi", "plan"),
    ("ffi", "sim/cuda_shim.h"),
    ("ffi", "xla"),
    ("kernels", "numerics"),
    ("kernels", "ptx"),
    ("plan", "kernels/gemm_params.h"),
    ("plan", "kernels/params.h"),
    ("plan", "kernels/relayout_params.h"),
    ("ptx", "numerics/base.h"),
    ("sim", "numerics"),
    ("sim", "driver/cuda_api.h"),
}
# Headers in quotes that come with jaxlib.
EXTERNAL = {"xla"}
# Compiled by NVRTC as well, where there is no standard library.
FREESTANDING = {"kernels", "numerics", "ptx"}

# Python files that may import a private module of ours or of jax, and do.
PRIVATE_IMPORTS = {
    "jax_fp4._core": {"_native.py", "cli/doctor.py"},  # doctor reports why it does not load
    "jax_fp4._sim": {"sim.py"},
    "jax._src": {"_compat.py"},
}

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cxx_violations(csrc: Path, arrows: set[tuple[str, str]]) -> list[str]:
    """One line for every #include that no arrow allows and for every arrow that nothing uses."""
    problems: list[str] = []
    unused = set(arrows)
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cc", ".cu"}):
        name = path.relative_to(csrc).as_posix()
        folder = name.split("/")[0]
        for bracket, included in _INCLUDE.findall(path.read_text()):
            if bracket == "<":
                if folder in FREESTANDING:
                    problems.append(f"{name}: <{included}> in a folder that is freestanding")
                continue
            header = included
            if included.split("/")[0] not in EXTERNAL:
                candidates = [path.parent / included, csrc / included]
                target = next((c.resolve() for c in candidates if c.is_file()), None)
                if target is None or not target.is_relative_to(csrc.resolve()):
                    problems.append(f'{name}: "{included}" is no file of csrc/')
                    continue
                header = target.relative_to(csrc.resolve()).as_posix()
            owner = header.split("/")[0]
            allowed = {(folder, owner), (folder, header)} & arrows
            unused -= allowed
            if owner != folder and not allowed:
                problems.append(f"{name}: includes {header}, but {folder} -> {owner} is no arrow")
    problems += [f"the arrow {a} -> {b} is used by no file" for a, b in sorted(unused)]
    return problems


def private_import_violations(package: Path, allowed: dict[str, set[str]]) -> list[str]:
    """One line for every import that is not allowed and for every permission that is not used."""
    problems = []
    unused = {(private, name) for private, names in allowed.items() for name in names}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        dotted = ".".join([package.name, *path.relative_to(package).parts[:-1]])
        for module in sorted(imported_modules(path, dotted)):
            for private, names in allowed.items():
                if module != private and not module.startswith(private + "."):
                    continue
                unused.discard((private, name))
                if name not in names:
                    problems.append(f"{name}: imports {module}, only {sorted(names)} may")
    problems += [f"{name}: may import {private}, but does not" for private, name in sorted(unused)]
    return problems


def oracle_violations(oracles: Path) -> list[str]:
    """One line for every import of an oracle beyond the standard library, NumPy and oracles."""
    allowed = {"numpy", "oracles", *sys.stdlib_module_names}
    return [
        f"{path.name}: imports {module}"
        for path in sorted(oracles.rglob("*.py"))
        for module in sorted(imported_modules(path, "oracles"))
        if module.split(".")[0] not in allowed
    ]


def test_cxx_includes_follow_the_arrows() -> None:
    """Every #include under csrc/ is an allowed arrow, and every allowed arrow is used."""
    assert cxx_violations(ROOT / "csrc", CXX_ARROWS) == []


def test_private_modules_are_imported_by_their_wrappers_only() -> None:
    """`_core` is touched by _native (and doctor), `_sim` by sim, and `jax._src` by no file."""
    assert private_import_violations(ROOT / "python" / "jax_fp4", PRIVATE_IMPORTS) == []


def test_oracles_import_nothing_of_ours() -> None:
    """An oracle that shares code with the implementation would share its mistakes."""
    assert oracle_violations(ROOT / "tests" / "oracles") == []


@pytest.mark.parametrize(
    ("folder", "line", "complaint"),
    [
        ("numerics", '#include "cpu/cpu.h"', "numerics -> cpu is no arrow"),
        ("numerics", "#include <cmath>", "freestanding"),
        ("cpu", '#include "xla/ffi/api/ffi.h"', "cpu -> xla is no arrow"),
        ("cpu", '#include "cpu/gone.h"', "is no file of csrc/"),
        ("cpu", "", "the arrow cpu -> numerics is used by no file"),
    ],
)
def test_cxx_check_detects_planted_faults(
    tmp_path: Path, folder: str, line: str, complaint: str
) -> None:
    """The check above complains about each kind of fault, and about nothing else."""
    for name in ("numerics", "cpu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.h").write_text("#pragma once\n")
    user = tmp_path / "cpu" / "user.cc"
    user.write_text('#include "numerics/numerics.h"\n#include "cpu.h"\n#include <cstdint>\n')
    arrows = {("cpu", "numerics")}
    assert cxx_violations(tmp_path, arrows) == []

    if line:
        (tmp_path / folder / "planted.h").write_text(line + "\n")
    else:
        user.unlink()
    problems = cxx_violations(tmp_path, arrows)
    assert len(problems) == 1
    assert complaint in problems[0]


@pytest.mark.parametrize(
    "line",
    [
        "from jax_fp4 import _core",
        "from . import _core",
        "from ._core import quantize",
        "import jax_fp4._core as core",
        "from jax._src import core",
        "import jax._src.interpreters.ad",
    ],
)
def test_private_import_check_detects_planted_faults(tmp_path: Path, line: str) -> None:
    """Every way to write the import is seen, in every file but the one that may."""
    package = tmp_path / "jax_fp4"
    package.mkdir()
    allowed = {"jax_fp4._core": {"_native.py"}, "jax._src": {"_compat.py"}}
    (package / "_native.py").write_text("from jax_fp4 import _core\n")
    (package / "_compat.py").write_text("from jax._src import core\n")
    assert private_import_violations(package, allowed) == []

    (package / "dot.py").write_text(f"def f():\n    {line}\n")
    assert private_import_violations(package, allowed) != []


def test_private_import_check_detects_an_unused_permission(tmp_path: Path) -> None:
    """A file that may import a private module but does not is reported."""
    (tmp_path / "_native.py").write_text("import math\n")
    problems = private_import_violations(tmp_path, {"jax_fp4._core": {"_native.py"}})
    assert problems == ["_native.py: may import jax_fp4._core, but does not"]


def test_oracle_check_detects_a_planted_import(tmp_path: Path) -> None:
    """An oracle that imports the package is seen."""
    (tmp_path / "good.py").write_text("import math\nimport numpy as np\nfrom oracles import good\n")
    assert oracle_violations(tmp_path) == []
    (tmp_path / "bad.py").write_text("from jax_fp4 import formats\n")
    assert oracle_violations(tmp_path) != []
