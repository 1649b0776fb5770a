"""The project's own files, for the tests of tests/meta that read them."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What builds, tools and editors leave behind.
_GENERATED = {"build", "dist", "out", "__pycache__", ".git"}
_SOURCE_SUFFIXES = {
    "", ".cc", ".cfg", ".cmake", ".cu", ".def", ".h", ".ini", ".json", ".md", ".py", ".pyi",
    ".sh", ".toml", ".txt", ".yaml", ".yml",
}  # fmt: skip


def _is_generated(name: str) -> bool:
    # .ci and the dot files of the top folder are ours; caches and environments are not.
    return name in _GENERATED or (name.startswith(".") and name != ".ci")


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """Every text file of the project, sorted; nothing that a build or a tool has made."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not _is_generated(name))
        for name in sorted(names):
            path = Path(folder) / name
            if path.suffix in _SOURCE_SUFFIXES and not path.is_symlink():
                yield path


def imported_modules(path: Path, package: str) -> set[str]:
    """Dotted names that a Python file imports, `from a import b` as both "a" and "a.b".

    Args:
        path: the file.
        package: the package that the file is in, which relative imports start from.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found
