"""``python -m jax_fp4 plan``: what runs on a GPU for a product, without one."""

from __future__ import annotations

import argparse
import json
import sys

DESCRIPTION = """\
Prints the kernel, tiles, splits and workspace that a GPU would use for D[M, N] = A[M, K] B[N, K]^T
with both operands quantized along K. The predicted time is a model's, not a measurement.
"""

# Compute capability and SMs, from NVIDIA's data sheets.
CHIPS = {
    "b200": (100, 148),
    "b300": (103, 148),
    "rtx5090": (120, 170),
    "dgx-spark": (121, 48),
    "h100": (90, 132),
    "a100": (80, 108),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    for name in ("m", "n", "k"):
        parser.add_argument(name, type=int, metavar=name.upper())
    parser.add_argument("--batch", type=int, default=1, help="products of one call (default: 1)")
    parser.add_argument("--format", default="NVFP4", help="of A, and of B without --format-b")
    parser.add_argument("--format-b", help="of B")
    parser.add_argument(
        "--groups",
        choices=("rows", "k"),
        help="the batch are groups of rows of A, each with its own B, or of K",
    )
    parser.add_argument("--shared", choices=("a", "b"), help="operand without a batch of its own")
    parser.add_argument("--linear", action="store_true", help="scales are linear, not tiled")
    parser.add_argument(
        "--out-dtype", default="bfloat16", choices=("float32", "bfloat16", "float16")
    )
    parser.add_argument("--chip", default="b200", choices=CHIPS, help="(default: b200)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 2 for a problem that has no plan."""
    from jax_fp4 import _native
    from jax_fp4.formats import FORMATS

    names = {format.name.lower(): format for format in FORMATS}
    operands: list[str] = []
    for given in (arguments.format, arguments.format_b or arguments.format):
        format = names.get(given.lower())
        if format is None:
            known = ", ".join(f.name for f in FORMATS)
            print(f"jax_fp4 plan: --format: expected one of {known}, got {given}", file=sys.stderr)
            return 2
        layout = "linear" if arguments.linear else "tiled"
        operands.append(f"{format.attribute()} layout={layout}")
    batched = arguments.batch != 1 and arguments.groups is None
    if arguments.groups is not None and arguments.shared is not None:
        print("jax_fp4 plan: --shared does not go with --groups", file=sys.stderr)
        return 2
    chip, multiprocessors = CHIPS[arguments.chip]
    try:
        plan = _native.plan_gemm(
            operands[0],
            operands[1],
            (arguments.batch, arguments.m, arguments.n, arguments.k),
            (
                batched and arguments.shared != "a",
                (batched and arguments.shared != "b") or arguments.groups == "rows",
            ),
            arguments.out_dtype,
            chip,
            multiprocessors,
            arguments.groups or "",
        )
    except ValueError as error:
        print(f"jax_fp4 plan: {error}", file=sys.stderr)
        return 2
    text = plan.pop("text")
    if arguments.json:
        print(json.dumps(plan, indent=1))
    else:
        print(f"{arguments.chip}: compute capability {chip / 10:.1f}, {multiprocessors} SMs")
        print(text, end="")
    return 0
