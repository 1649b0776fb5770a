"""Groups of rows and of K in every product kernel, with group numbers that mean nothing.

The host cannot look at them, so a kernel may find anything there: it must not read or write outside
of its operands, and what it does has to be what csrc/kernels/gemm_params.h says.
"""

from typing import Any

import numpy as np
import pytest

from jax_fp4 import sim
from support import gemm_bf16, gemm_kernels
from support.gemm_kernels import Problem, Run, Variant, changed_ptx, expected, random_problem

MX = ("e4m3", "e2m1")
VARIANTS = [
    (Variant("nvfp4", 1, 128), None),
    (Variant("mxf8f6f4", 1, 64), MX),
    (Variant("nvfp4", 1, 64, "sm120"), None),
    (Variant("mxf8f6f4", 1, 64, "sm120"), MX),
    (gemm_bf16.Variant("nvfp4", 1, 128, "80"), None),
    (gemm_bf16.Variant("mxf8f6f4", 1, 128, "90"), MX),
]
PAIR = (Variant("nvfp4", 2, 128), None)  # which is for groups of K only
ROWS = [2, 3, 1 << 31, 0, 77, -1]  # of three groups
K = [300, 128, 640, 1 << 30, 5, (1 << 32) - 1, 0, 250]


def rows(variant: Variant, elements: Any) -> Problem:
    p = random_problem(
        variant, len(ROWS) * 128, 72, 128, batch=(1, 3), elements=elements, row_groups=ROWS
    )
    p.a.global_scale = np.array([1.5, 0.75, 3], np.float32)
    return p


def columns(variant: Variant, elements: Any) -> Problem:
    p = random_problem(variant, 70, 72, 768, elements=elements, k_groups=K, out="bf16")
    p.a.global_scale = np.arange(1, len(K)).astype(np.float32)
    return p


def check(problem: Problem, seed: int = 0) -> None:
    kernels = gemm_bf16 if isinstance(problem.variant, gemm_bf16.Variant) else gemm_kernels
    kernels.check(problem, seed)


@pytest.mark.parametrize(("variant", "elements"), VARIANTS, ids=lambda v: getattr(v, "name", ""))
def test_numbers_of_no_group(variant: Variant, elements: Any) -> None:
    """Rows of no group are left alone; their tiles do nothing else either."""
    check(rows(variant, elements))


@pytest.mark.parametrize(
    ("variant", "elements"), [*VARIANTS, PAIR], ids=lambda v: getattr(v, "name", "")
)
def test_ranges_that_are_none(variant: Variant, elements: Any) -> None:
    """Beyond K, backwards, not at a multiple of 128: cut, empty, rounded down."""
    check(columns(variant, elements))


@pytest.mark.kernels
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("variant", "elements"), [*VARIANTS, PAIR], ids=lambda v: getattr(v, "name", "")
)
def test_every_schedule_gives_the_same_bits(variant: Variant, elements: Any, seed: int) -> None:
    """Both kinds of groups, under all checks."""
    if variant.group == 1:
        check(rows(variant, elements), seed)
    check(columns(variant, elements), seed)


@pytest.mark.parametrize(
    ("old", "new", "make"),
    [
        ("if (tile.batch >= p.groups)", "if (tile.batch >= 1u << 31)", rows),
        ("step < p.steps ? step : p.steps", "step", columns),
        ("end > tile.first_step ? end - tile.first_step : 0", "end - tile.first_step", columns),
        ("/ kGroupUnit * (kGroupUnit / kStepK)", "/ kStepK", columns),
    ],
)
def test_a_guard_less_is_seen(old: str, new: str, make: Any) -> None:
    """Each guard is needed: without it there is a report, or another D."""
    variant = Variant("nvfp4", 1, 64)
    problem = make(variant, None)
    machine = sim.Machine("100a", 0, sim.Checks(strict=True))
    run = Run(problem, machine, machine.load(changed_ptx(variant, old, new, "raster.h")))
    try:
        run.launch(max_instructions=1 << 16)
    except sim.SimulationError:
        return
    assert (run.result() != expected(problem)).any()
