"""Mixed formats: which format each layer gets, so that the least is lost with so many bits.

Each choice has a cost, measured by whoever calls this, for example the divergence of the model's
output with that layer alone quantized (cli/calibrate.py). Costs of layers are added up, which is
right to first order. `assign` then solves the problem exactly.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_fp4.block_array import BlockScaledArray
from jax_fp4.convert.rules import FORMATS, KEEP
from jax_fp4.formats import Format

CANDIDATES = ("mxfp4", "nvfp4", "mxfp6", "mxfp8", KEEP)
"""Names of formats, as rules have them; "keep" is bfloat16."""


class BudgetError(ValueError):
    """No assignment needs so few bits."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layer in a format: its stored bits, scales included, and what it costs."""

    bits: int
    cost: float


def format_bits(name: str, rows: int, length: int) -> int:
    """Stored bits of a matrix [rows, length] in a format of `CANDIDATES`, scales included."""
    if name == KEEP:
        return 16 * rows * length
    return _bits(FORMATS[name], rows, length, 1)


def stored_bits(w: Any) -> int:
    """Stored bits of an array or a `BlockScaledArray`, scales included."""
    if isinstance(w, BlockScaledArray):
        *lead, rows, _ = w.values.shape
        return _bits(w.format, math.prod(lead) * rows, w.length, math.prod(lead))
    return 8 * w.nbytes


def _bits(format: Format, rows: int, length: int, tensors: int) -> int:
    scales = 8 * rows * format.blocks(length) + 32 * tensors * format.tensor_scaled
    return format.bits * rows * length + scales


def fitting(length: int) -> list[str]:
    """The candidates whose blocks divide a contracted length."""
    return [n for n in CANDIDATES if n == KEEP or length % FORMATS[n].block == 0]


def assign(choices: Mapping[str, Mapping[str, Choice]], budget_bits: int) -> dict[str, str]:
    """The choice for each layer with the least sum of costs within a budget; exact.

    Layer by layer, only those sums are kept that no other one beats in bits and cost. There are as
    many as different sums of bits at most, which are few where shapes repeat.

    Args:
        choices: for each layer its choices by name.
        budget_bits: of all layers together.

    Returns:
        The name of the choice for each layer. Of equal costs, the one with fewer bits.

    Raises:
        BudgetError: the smallest choices together need more.
        ValueError: a cost is not finite.
    """
    for layer, own in choices.items():
        for name, choice in own.items():
            if not math.isfinite(choice.cost):
                raise ValueError(f"jax_fp4.convert.mixed: {layer} in {name} costs {choice.cost}")
    least = [min(choice.bits for choice in own.values()) for own in choices.values()]
    if sum(least) > budget_bits:
        raise BudgetError(f"{sum(least)} bits are needed at least, the budget is {budget_bits}")
    rest = sum(least)
    # (bits, cost, (choice, what was before)), bits rising and costs falling
    kept: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for own, smallest in zip(choices.values(), least, strict=True):
        rest -= smallest  # what the layers after this one need
        sums = sorted(
            (
                (bits + choice.bits, cost + choice.cost, (name, before))
                for bits, cost, before in kept
                for name, choice in own.items()
                if bits + choice.bits + rest <= budget_bits
            ),
            key=lambda one: one[:2],
        )
        kept = []
        for one in sums:
            if not kept or one[1] < kept[-1][1]:
                kept.append(one)
    chain = kept[bisect.bisect_right([bits for bits, _, _ in kept], budget_bits) - 1][2]
    names = []
    while chain is not None:
        name, chain = chain
        names.append(name)
    return dict(zip(choices, reversed(names), strict=True))


def rules_text(assignment: Mapping[str, str], comment: str) -> str:
    """A rules file for ``convert --to mixed``: tensors by their names, and the rest stays.

    Args:
        assignment: a candidate for each tensor.
        comment: its first line.
    """
    lines = [f"# {comment}"]
    for name in CANDIDATES:
        tensors = [_literal(tensor) for tensor, chosen in assignment.items() if chosen == name]
        if tensors:
            listed = "".join(f"  {_quoted(tensor)},\n" for tensor in tensors)
            lines.append(f'\n[[rule]]\nformat = "{name}"\nmatch = [\n{listed}]')
    return "\n".join(lines) + "\n"


def _literal(name: str) -> str:
    """A shell pattern that matches this name only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
