"""Tests of the GPU handlers: JAX's CPU platform runs the kernels in the PTX machine.

They run in a process of their own, with JAX_FP4_DRIVER=sim (`make test-device`): a process has one
set of handlers.
"""

from collections.abc import Generator

import pytest

from jax_fp4 import _native


@pytest.fixture(autouse=True)
def driver() -> Generator[None]:
    """Every test has a new simulated driver, and one that the machine has not found fault with."""
    assert _native.SIMULATED, "run these tests with `make test-device` (JAX_FP4_DRIVER=sim)"
    _native.reset_sim_driver("100a", 0)
    yield
    _native.reset_sim_driver("100a", 0)
