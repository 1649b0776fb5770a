"""Mixed formats: the assignment is the best one within its budget, and the rules file says it.

Contract: no other choice of formats within the budget costs less; `convert` reads from the file
what was chosen; bits are those of the stored tensors, scales included.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import jax_fp4
from jax_fp4.convert import mixed
from jax_fp4.convert.mixed import BudgetError, Choice, assign
from jax_fp4.convert.rules import FORMATS, read_rules

Choices = dict[str, dict[str, Choice]]


def random_choices(generator: np.random.Generator, layers: int, negative: bool) -> Choices:
    low = -1.0 if negative else 0.0
    return {
        f"layer{i}": {
            f"format{j}": Choice(int(generator.integers(1, 30)), float(generator.uniform(low, 1)))
            for j in range(int(generator.integers(1, 5)))
        }
        for i in range(layers)
    }


def brute_force(choices: Choices, budget: int) -> float | None:
    """The least cost of all combinations within the budget."""
    sums = [
        sum(one.cost for one in combination)
        for combination in itertools.product(*(own.values() for own in choices.values()))
        if sum(one.bits for one in combination) <= budget
    ]
    return min(sums, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_assignment_is_the_best_of_all(seed: int) -> None:
    """Against every combination, at budgets around what is needed."""
    generator = np.random.default_rng(seed)
    choices = random_choices(generator, 1 + seed % 6, negative=bool(seed % 2))
    least = sum(min(c.bits for c in own.values()) for own in choices.values())
    most = sum(max(c.bits for c in own.values()) for own in choices.values())
    for budget in {least, (least + most) // 2, (3 * least + most) // 4, most}:
        chosen = assign(choices, budget)
        assert list(chosen) == list(choices)
        picked = [choices[layer][name] for layer, name in chosen.items()]
        assert sum(one.bits for one in picked) <= budget
        assert sum(one.cost for one in picked) == pytest.approx(
            brute_force(choices, budget), abs=1e-12
        )
    with pytest.raises(BudgetError, match=rf"{least} bits are needed at least"):
        assign(choices, least - 1)


def test_equal_costs_take_fewer_bits() -> None:
    """A format that gains nothing is not paid for."""
    choices = {"layer": {"long": Choice(9, 0.5), "short": Choice(4, 0.5), "bad": Choice(1, 0.6)}}
    assert assign(choices, 100) == {"layer": "short"}


def test_many_layers_are_assigned_exactly_and_soon() -> None:
    """300 layers of three shapes: where costs are proportional to weights, by threshold."""
    choices: Choices = {}
    for i in range(300):
        weights = (1, 3, 4)[i % 3] << 20
        choices[f"layer{i}"] = {
            "nvfp4": Choice(9 * weights // 2, 1.0 + i),
            "mxfp8": Choice(33 * weights // 4, 0.1),
        }
    chosen = assign(choices, sum(own["nvfp4"].bits for own in choices.values()) + (60 << 20))
    upgraded = [layer for layer, name in chosen.items() if name == "mxfp8"]
    assert 3 <= len(upgraded) <= 16 and all(int(layer[5:]) % 3 == 0 for layer in upgraded)


def test_a_cost_that_is_not_finite_is_refused() -> None:
    """NaN would compare with nothing."""
    with pytest.raises(ValueError, match=r"layer in nvfp4 costs nan"):
        assign({"layer": {"nvfp4": Choice(1, float("nan"))}}, 5)


def test_rules_say_what_was_assigned(tmp_path: Path) -> None:
    """Also for names that hold pattern characters and quotes; other tensors stay."""
    names = ["a.weight", "b[0].weight", "c*.weight", 'd"q".weight', "e?\\.weight"]
    assignment = dict(zip(names, mixed.CANDIDATES, strict=True))
    path = tmp_path / "rules.toml"
    path.write_text(mixed.rules_text(assignment, "Made by a test."))
    rules = read_rules(path, None, "nearest")
    rules.check_used(names)
    for name, format in assignment.items():
        assert rules.decide(name, "bfloat16", (32, 64)).format == FORMATS.get(format)
    for other in ("b0.weight", "cc.weight", "a.weight2", "norm"):
        assert rules.decide(other, "bfloat16", (32, 64)).format is None


@pytest.mark.parametrize(
    ("name", "bits_a_weight"),
    [("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp6", 6.25), ("mxfp8", 8.25), ("keep", 16.0)],
)
def test_bits_are_those_of_what_is_stored(name: str, bits_a_weight: float) -> None:
    """Codes and a scale byte a block; 32 bits more for the tensor scale of NVFP4."""
    rows, length = 24, 96
    wanted = round(bits_a_weight * rows * length) + (32 if name == "nvfp4" else 0)
    assert mixed.format_bits(name, rows, length) == wanted
    if name != "keep":
        q = jax_fp4.quantize(np.ones((rows, length), np.float32), FORMATS[name])
        assert mixed.stored_bits(q) == wanted
    assert mixed.fitting(96) == list(mixed.CANDIDATES)
    assert mixed.fitting(16) == ["nvfp4", "keep"]
    assert mixed.fitting(8) == ["keep"]
