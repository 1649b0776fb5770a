"""Writes docs/forms.md: which kernel of others executes which instruction and descriptor form.

    PYTHONPATH=tests python tests/sim/foreign/forms.py docs/forms.md [--programs FOLDER]

Runs the tests of this folder one witness at a time, in processes of their own, and CUTLASS's
programs (compiled into FOLDER unless they are there). Takes half an hour, and the extra `foreign`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from jax_fp4 import sim
from support import cutlass_examples
from support.repository import ROOT

HERE = Path(__file__).parent
# Name of a witness -> (file, tests). Each name is a column's entry.
TESTS = {
    "Triton": {
        "quantizer": ("test_triton.py", "test_quantizer"),
        "bf16 product": ("test_triton.py", "test_bf16_product"),
        "NVFP4 and MXFP4 products": ("test_triton.py", "test_fp4_product"),
    },
    "CuTe-DSL": {
        "one CTA": ("test_cute_dsl.py", "test_product and 1-mxf"),
        "pairs": ("test_cute_dsl.py", "test_product and 2-mxf"),
    },
}
MAP_TYPES = (
    "UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT16", "FLOAT32", "FLOAT64",
    "BFLOAT16", "16U4_ALIGN8B", "16U4_ALIGN16B", "16U6_ALIGN16B",
)  # fmt: skip
MAP_SWIZZLES = (
    "NONE", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B",
)  # fmt: skip
MATRIX_FORMS = tuple(
    f"matrix descriptor: {major}-major, swizzle {swizzle}"
    for major in ("K", "MN")
    for swizzle in ("NONE", "32B", "64B", "128B", "128B_ATOM_32B")
    if (major, swizzle) != ("K", "128B_ATOM_32B")  # does not exist
)


def _lines(file: Path) -> set[str]:
    return set(file.read_text().splitlines()) if file.exists() else set()


def executed_by_tests(file: str, expression: str, scratch: Path) -> set[str]:
    """What some tests of this folder execute; they have to pass."""
    forms = scratch / "forms"
    forms.unlink(missing_ok=True)
    subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "",
            str(HERE / file), "-k", expression,
        ],
        check=True, cwd=ROOT,
        env=os.environ | {"JAX_FP4_SIM_FORMS": str(forms), "JAX_FP4_REQUIRE_ALL": "1"},
    )  # fmt: skip
    return _lines(forms)


def executed_by_program(name: str, folder: Path, scratch: Path) -> set[str]:
    """What a CUTLASS example executes; it has to pass."""
    program = folder / name
    if not program.exists():
        cutlass_examples.build(name, folder)
    forms = scratch / "forms"
    forms.unlink(missing_ok=True)
    for seed in range(2):
        done = cutlass_examples.run(program, name, seed, JAX_FP4_SIM_FORMS=str(forms))
        assert "Disposition: Passed" in done.stdout, done.stderr
    return _lines(forms)


def document(witnesses: dict[str, dict[str, set[str]]]) -> str:
    """The page, from {group: {witness: what it executes}}."""
    all_forms = sim.unreached_forms()  # nothing was launched in this process
    by_form: dict[str, list[str]] = defaultdict(list)
    for group, members in witnesses.items():
        for forms in members.values():
            for form in forms:
                if group not in by_form[form]:
                    by_form[form].append(group)
    rows: dict[str, list[str]] = defaultdict(list)  # row -> alternatives
    for form in all_forms:
        row, _, alternative = form.partition(": ")
        rows[row].append(alternative)
    text = [HEAD.strip(), "", "## Witnesses", ""]
    text += [f"* **{group}**: {', '.join(members)}" for group, members in witnesses.items()]
    text += ["", "## Instructions", "", "| form | executed by | not executed |", "|---|---|---|"]
    unproven = []
    for row, alternatives in rows.items():
        names = [f"{row}: {a}" if a else row for a in alternatives]
        groups = [g for g in witnesses if any(g in by_form[name] for name in names)]
        if not groups:
            unproven.append(row)
            continue
        both = zip(alternatives, names, strict=True)
        missing = [a.lstrip(".") for a, name in both if not by_form[name]]
        text.append(f"| `{_code(row)}` | {', '.join(groups)} | {_code(' '.join(missing))} |")
    text += ["", "## Descriptors", "", "| form | executed by |", "|---|---|"]
    for name, matches in _descriptors():
        groups = [g for g in witnesses if any(g in by_form[f] for f in by_form if matches(f))]
        text.append(f"| {name} | {', '.join(groups) or 'nobody: unproven'} |")
    total = sum(len(a) for a in rows.values())
    seen = sum(1 for form in all_forms if by_form[form])
    text += [
        "", "## Unproven", "",
        f"{len(unproven)} of {len(rows)} forms ({total - seen} of {total} alternatives) are "
        "executed by our own tests and kernels only:", "",
    ]  # fmt: skip
    text += [f"* `{row}`" for row in unproven]
    return "\n".join(text) + "\n"


def _code(text: str) -> str:
    return text.replace("|", "\\|")


def _descriptors() -> list[tuple[str, Callable[[str], bool]]]:
    result: list[tuple[str, Callable[[str], bool]]] = []
    for kind in MAP_TYPES:
        result.append((f"tensor map of {kind}", _starts(f"tensor map: {kind}, ")))
    for swizzle in MAP_SWIZZLES:
        result.append((f"tensor map with swizzle {swizzle}", _ends(f"swizzle {swizzle}")))
    for form in MATRIX_FORMS:
        result.append((form.replace(":", " of tcgen05,"), _starts(form, whole=True)))
    return result


def _starts(text: str, whole: bool = False) -> Callable[[str], bool]:
    return lambda form: form == text if whole else form.startswith(text)


def _ends(text: str) -> Callable[[str], bool]:
    return lambda form: form.startswith("tensor map: ") and form.endswith(", " + text)


HEAD = """
# Forms and their witnesses

Which instruction forms of the PTX machine's table (`csrc/sim/isa.def`), and which forms of
descriptors, kernels execute that others have written or compiled. All of these kernels run clean
on the machine and give results that an independent oracle, or the reference check of their own
host program, confirms bit for bit. Every form has tests of ours too; a form without a witness
here could rest on a misreading that our tests and our kernels share. Compilers choose the
alternatives: what a witness has not executed is in the last column.

Written by `tests/sim/foreign/forms.py` (needs the extra `foreign`);
`tests/sim/test_forms_page.py` checks that it lists the whole table.
"""


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--programs", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        programs = arguments.programs or scratch
        witnesses = {
            group: {
                name: executed_by_tests(file, expression, scratch)
                for name, (file, expression) in members.items()
            }
            for group, members in TESTS.items()
        }
        witnesses["CUTLASS"] = {
            f"example {name}": executed_by_program(name, programs, scratch)
            for name in cutlass_examples.EXAMPLES
        }
    arguments.page.write_text(document(witnesses))


if __name__ == "__main__":
    main()
