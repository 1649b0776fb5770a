"""The public names are those that docs/index.md lists, and each says what it does."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import jax_fp4
from support.repository import ROOT

FUNCTIONS = [name for name in jax_fp4.__all__ if inspect.isfunction(getattr(jax_fp4, name))]


def documented_names(markdown: str) -> list[str]:
    """Names in the first column of the table under "## Public names"."""
    _, _, section = markdown.partition("\n## Public names\n")
    section = section.partition("\n## ")[0]
    cells = re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
    return re.findall(r"`(\w+)", " ".join(cells))


def docstring_gaps(function: Callable[..., Any]) -> list[str]:
    """What the docstring of a public function leaves out of its signature.

    Where there are no arguments, one sentence may say what is returned.
    """
    doc = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    arguments = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    described = (
        re.findall(r"^ +\*{0,2}([\w, *]+):", arguments.group(1), re.MULTILINE) if arguments else []
    )
    named = {name.strip(" *") for line in described for name in line.split(",")}
    gaps = [f"argument {name}" for name in signature.parameters if name not in named]
    if not doc:
        gaps.append("docstring")
    returns = signature.return_annotation not in (None, "None")
    if returns and signature.parameters and not re.search(r"^(Returns|Yields):", doc, re.MULTILINE):
        gaps.append("Returns:")
    return gaps


def test_public_names_are_the_documented_ones() -> None:
    """`jax_fp4.__all__` and the table in docs/index.md hold the same names, each once."""
    documented = documented_names((ROOT / "docs" / "index.md").read_text())
    assert sorted(documented) == sorted(jax_fp4.__all__)


def test_public_names_exist_and_nothing_else_is_visible() -> None:
    """Every listed name is there; other names of the package are submodules or private."""
    for name in jax_fp4.__all__:
        assert hasattr(jax_fp4, name), name
    others = {
        name
        for name, value in vars(jax_fp4).items()
        if not name.startswith("_") and name not in jax_fp4.__all__ and not inspect.ismodule(value)
    }
    assert others == set()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_document_every_argument_and_the_result(name: str) -> None:
    """A public function's docstring has Args: with every parameter, and Returns:."""
    assert docstring_gaps(getattr(jax_fp4, name)) == []


@pytest.mark.parametrize("name", jax_fp4.__all__)
def test_public_objects_are_documented(name: str) -> None:
    """Public classes and modules have a docstring of their own."""
    value = getattr(jax_fp4, name)
    if inspect.isclass(value) or inspect.ismodule(value) or callable(value):
        assert value.__doc__


def test_docstring_check_detects_planted_gaps() -> None:
    """A missing argument, a missing result and a missing docstring are each reported."""

    def complete(a: int, *rest: int, b: int) -> int:
        """Adds.

        Args:
            a, rest: summands.
            b: one more,
                explained: at length.

        Returns:
            The sum.
        """
        return a + b + sum(rest)

    def incomplete(a: int, b: int) -> int:
        """Adds.

        Args:
            a: a summand.
        """
        return a + b

    def silent() -> None:
        pass

    assert docstring_gaps(complete) == []
    assert docstring_gaps(incomplete) == ["argument b", "Returns:"]
    assert docstring_gaps(silent) == ["docstring"]


def test_name_check_reads_the_table() -> None:
    """Names are taken from the table of the section, and from nowhere else."""
    table = "| `dot` `einsum` | `x` |\n| `quantize(x)` | y |\n"
    text = f"| `no` |\n\n## Public names\n\n{table}\n## More\n| `no` |\n"
    assert documented_names(text) == ["dot", "einsum", "quantize"]
