"""Faults planted in the kernels are seen: by the machine's checks, by canaries, by wrong bytes."""

import re

import numpy as np
import pytest

from jax_fp4 import sim
from support import cpu_quantize as cpu
from support import device_kernels as device
from support.cpu_quantize import Options
from support.device_kernels import Device

X = cpu.tricky_values(np.random.default_rng(8), (1, 33, 48), np.dtype(np.uint16))
BOTH = [Options(), Options(axis=0)]


@pytest.fixture(autouse=True)
def _tools() -> None:
    device.require_tools()


def agrees(fault: Device) -> bool:
    """Whether both copies have the CPU's bytes; the machine's reports pass through."""
    got = device.quantize(fault, X, *BOTH)
    return all(g.equals(w) for g, w in zip(got, cpu.quantize(X, *BOTH), strict=True))


def test_without_a_fault_both_copies_agree() -> None:
    """What the tests below compare with."""
    assert agrees(Device())


@pytest.mark.parametrize(
    "barrier",
    [
        (
            "prepare_passes(p, place, shared);\n  __syncthreads();",
            "prepare_passes(p, place, shared);",
        ),
        ("write_tile(shared, in);\n  __syncthreads();", "write_tile(shared, in);"),
        (
            "__syncthreads();\n  if constexpr (kColumns) {\n    store",
            "if constexpr (kColumns) {\n    store",
        ),
    ],
)
def test_a_missing_barrier_is_a_race(barrier: tuple[str, str]) -> None:
    """Between writing the constants, the tile or the staged codes and reading them."""
    with pytest.raises(sim.SimulationError) as error:
        agrees(Device(replace=barrier))
    assert error.value.kind in ("race", "uninitialized-memory")
    assert "shared" in str(error.value)


def test_a_barrier_missing_between_tiles_is_a_race() -> None:
    """The second tile of a CTA must not overwrite what the first one is still reading."""
    x = cpu.tricky_values(np.random.default_rng(9), (1, 300, 48), np.dtype(np.uint16))
    fault = Device(
        replace=(
            "quantize_tile(p, place, aligned, shared);\n      __syncthreads();",
            "quantize_tile(p, place, aligned, shared);",
        )
    )
    with pytest.raises(sim.SimulationError) as error:
        device.quantize(fault, x, Options(), max_y=1)  # no column copy, whose barriers would do
    assert error.value.kind == "race"


def test_reading_one_row_too_many_is_out_of_bounds() -> None:
    """Row 33 of 33."""
    fault = Device(replace=("int count = row < rows", "int count = row <= rows"))
    with pytest.raises(sim.SimulationError) as error:
        agrees(fault)
    assert error.value.kind == "out-of-bounds"
    assert "ld.global" in str(error.value)


def test_writing_one_row_too_many_meets_the_canary() -> None:
    """The row after the last one of the copy."""
    fault = Device(replace=("row < t.rows && byte < t.bytes", "row <= t.rows && byte < t.bytes"))
    with pytest.raises(AssertionError, match="written past it"):
        agrees(fault)


def test_swapped_nibbles_are_wrong_bytes() -> None:
    """The operands of a conversion the other way round."""
    conversion = re.compile(r"(cvt\.rn\.satfinite\.e2m1x2\.f32 \w+, )(%f\d+), (%f\d+);")
    fault = Device(mutate=lambda ptx: conversion.sub(r"\1\3, \2;", ptx))
    assert not agrees(fault)


def test_unwritten_padding_is_seen() -> None:
    """Tiled scales of rows that do not exist must be zero, not what the memory held."""
    o = Options(tiled_layout=True)
    fault = Device(replace=("row >= t.scale_rows ||", "row >= t.rows ||"))
    (got,) = device.quantize(fault, X, o)
    assert not got.equals(cpu.quantize(X, o)[0])


def test_stale_random_bits_are_wrong_bytes() -> None:
    """Group numbers that leave out the row."""
    o = Options(stochastic=True, seed=3)
    fault = Device(replace=(" + pair.row[g] * s.tile.groups", ""))
    (got,) = device.quantize(fault, X, o)
    assert not got.equals(cpu.quantize(X, o)[0])
