"""The command line, ``python -m jax_fp4``: one module for each command.

A command's module has `add_arguments(parser)` and `run(arguments) -> exit code`. It is imported
only when its command is called: an optional package that one command needs hurts no other.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

_COMMANDS = {
    "demo": "train a small transformer in bf16 and in NVFP4, and compare",
    "convert": "quantize a checkpoint",
    "calibrate": "find the formats for the layers of the demo's model",
    "generate": "continue a text with the demo's model, in any format",
    "doctor": "say what is installed, what is used and what is missing",
    "verify": "run every kernel on every backend that is here, and compare",
    "bench": "measure this machine against other implementations",
    "memory": "say what a training step of a large model keeps and moves, in bytes",
    "plan": "say which kernel a GPU would run for a product",
    "sim": "run a PTX kernel on the CPU and watch it",
}
_PROGRAM = "python -m jax_fp4"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: of the command line; by default those of this process.

    Returns:
        The exit code: 0, 1 for a negative answer, 2 for a wrong argument, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog=_PROGRAM, description="Block-scaled FP4 matrix products for JAX.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        if words[:1] == [name]:
            module = importlib.import_module(f"{__name__}.{name}")
            command.description = getattr(module, "DESCRIPTION", command.description)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    try:
        namespace = parser.parse_args(words)
        return namespace.run(namespace)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
