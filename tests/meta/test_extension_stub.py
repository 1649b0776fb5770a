"""The stub that the type checker reads describes the extension that is built."""

import ast
from typing import Any

from jax_fp4 import _core
from support.repository import ROOT

STUB = ROOT / "python" / "jax_fp4" / "_core.pyi"


def stub_signatures(text: str) -> dict[str, str]:
    """Name -> "name(arguments) -> result" of every function of a stub."""
    return {
        node.name: f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    }


def native_signatures(module: Any) -> dict[str, str]:
    """The same of an extension module; nanobind puts the signature on a docstring's first line."""
    return {
        name: value.__doc__.splitlines()[0].removeprefix("def ")
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("__")
    }


def test_stub_has_the_signatures_of_the_extension() -> None:
    """Same functions, same arguments, same results."""
    assert stub_signatures(STUB.read_text()) == native_signatures(_core)


def test_stub_has_the_constants_of_the_extension() -> None:
    """Every annotated name of the stub is an attribute, and every other attribute a function."""
    annotated = {
        node.target.id
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    constants = {
        name
        for name, value in vars(_core).items()
        if not callable(value) and not name.startswith("__")
    }
    assert annotated == constants


def test_stub_check_detects_planted_differences() -> None:
    """A changed argument, result or name differs."""
    good = stub_signatures("def f(x: int) -> str: ...")
    assert good == {"f": "f(x: int) -> str"}
    for bad in (
        "def f(y: int) -> str: ...",
        "def f(x: str) -> str: ...",
        "def f(x: int) -> None: ...",
        "def g(x: int) -> str: ...",
    ):
        assert stub_signatures(bad) != good
