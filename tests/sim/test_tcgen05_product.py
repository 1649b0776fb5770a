"""A whole NVFP4 product on tensor memory, from tensor maps to tcgen05.ld, by a CTA or a pair."""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import mma
from support import nvfp4_tile

K = 768  # three blocks: both stages are used, one of them twice


def operands(group: int, k: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Codes of all values, and scales with exponents that do not overflow."""
    rng = np.random.default_rng(group)
    codes = tuple(rng.integers(0, 16, (128 * group, k), dtype=np.uint8) for _ in range(2))
    scales = tuple(rng.integers(0x20, 0x58, (128 * group, k // 16), np.uint8) for _ in range(2))
    return codes, scales


@pytest.mark.parametrize("group", [1, 2])
def test_product_equals_the_model_at_every_seed(group: int) -> None:
    """Bit for bit the tensor core's model, with random codes and scales, and no warnings."""
    codes, scales = operands(group, K)
    want = mma.product_k64(*codes, *scales, "ue4m3")
    text = nvfp4_tile.kernel(group, K // nvfp4_tile.BLOCK)
    for seed in range(20):
        machine = sim.Machine("100a", seed)
        got = nvfp4_tile.launch(machine, machine.load(text), codes, scales)
        np.testing.assert_array_equal(got.view(np.uint32), want)


# Instruction that is taken away, in kernels of how many CTAs, and the fault that comes of it.
MISSING = [
    ("tcgen05.commit", 1, "deadlock"),
    ("tcgen05.commit", 2, "deadlock"),
    ("tcgen05.wait::ld", 1, "race"),
    ("tcgen05.wait::ld", 2, "race"),
    ("tcgen05.dealloc", 1, "tensor-memory"),
    ("tcgen05.dealloc", 2, "tensor-memory"),
    ("fence.mbarrier_init", 2, "race"),
]


@pytest.mark.parametrize(("name", "group", "kind"), MISSING)
def test_a_missing_instruction_is_reported(name: str, group: int, kind: str) -> None:
    """Instructions that order or release, removed: a fault at every seed, in strict mode."""
    codes, scales = operands(group, nvfp4_tile.BLOCK)
    text = nvfp4_tile.kernel(group, 1)
    lines = [line for line in text.splitlines() if not line.startswith(name)]
    assert len(lines) < len(text.splitlines())
    for seed in range(5):
        machine = sim.Machine("100a", seed, sim.Checks(strict=True))
        with pytest.raises(sim.SimulationError) as caught:
            nvfp4_tile.launch(machine, machine.load("\n".join(lines)), codes, scales)
        assert caught.value.kind == kind, caught.value
