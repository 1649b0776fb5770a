"""NVIDIA's block-scaled GEMM, compiled by CuTe-DSL: clean on the machine, right bits, 20 schedules.

Neither the kernel nor its compiler is ours: TMA, mbarriers, scales through tcgen05.cp, one CTA or a
pair, persistent tiles, an epilogue that never waits for its tcgen05.ld.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import mma

pytestmark = pytest.mark.foreign

SEEDS = range(20)
CLUSTERS = 2  # for four tiles


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    pytest.importorskip("nvidia_cutlass_dsl", reason="not installed (extra `foreign`)")
    pytest.importorskip("torch", reason="not installed (extra `foreign`)")
    from support import cute_kernels

    yield cute_kernels


def operands(name: str, m: int, n: int, k: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Codes and scale bytes of A and B; all codes but the NaNs of E4M3."""
    rng = np.random.default_rng(3)
    codes = [rng.integers(0, 256 if name == "mxfp8" else 16, (rows, k)) for rows in (m, n)]
    codes = [np.where(x % 128 == 127, 0, x).astype(np.uint8) for x in codes]
    low, high = (0x20, 0x50) if name == "nvfp4" else (120, 134)
    block = 16 if name == "nvfp4" else 32
    scales = [rng.integers(low, high, (rows, k // block)).astype(np.uint8) for rows in (m, n)]
    return codes, scales


def product(name: str, codes: list[np.ndarray], scales: list[np.ndarray]) -> np.ndarray:
    if name == "mxfp8":
        return mma.product_k32(*codes, *scales, ("e4m3", "e4m3"))
    return mma.product_k64(*codes, *scales, "ue4m3" if name == "nvfp4" else "ue8m0")


@pytest.mark.parametrize(
    ("name", "ctas", "kind"),
    [
        ("nvfp4", 1, "mxf4nvf4.block_scale.block16"),
        ("nvfp4", 2, "mxf4nvf4.block_scale.block16"),
        ("mxfp4", 1, "mxf4nvf4.block_scale.block32"),
        ("mxfp4", 2, "mxf4nvf4.block_scale.block32"),
        ("mxfp8", 1, "mxf8f6f4.block_scale"),
        ("mxfp8", 2, "mxf8f6f4.block_scale"),
    ],
)
def test_product(kernels: Any, name: str, ctas: int, kind: str) -> None:
    """Four tiles that M, N and K do not fill, two for each CTA or pair; no warning."""
    m, n, k = 256 * ctas - 72, 236, 448 if name != "mxfp8" else 352
    ptx = kernels.compiled(name, ctas, m, n, k, CLUSTERS)
    assert f"tcgen05.mma.cta_group::{ctas}.kind::{kind}" in ptx
    assert "tcgen05.wait::ld" not in ptx
    codes, scales = operands(name, m, n, k)
    want = product(name, codes, scales)
    for seed in SEEDS:
        d, report = kernels.launch(ptx, name, ctas, codes, scales, CLUSTERS, seed)
        np.testing.assert_array_equal(d.view(np.uint32), want)
        assert not report.warnings


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (r"fence\.proxy\.async[^;]*;", {"proxy"}),
        (r"cp\.async\.bulk\.wait_group\.read[^;]*;", {"race"}),
        (r"bar\.sync\s+1[^;]*;", {"race", "uninitialized-memory"}),
        (r"tcgen05\.commit[^;]*;", {"deadlock"}),
    ],
)
def test_the_kernel_without_its_order_is_caught(
    kernels: Any, pattern: str, kinds: set[str]
) -> None:
    """What makes the runs above clean: without these lines, no schedule is."""
    ptx = kernels.compiled("nvfp4", 1, 256, 256, 512, CLUSTERS)
    broken, removed = re.subn(pattern, "", ptx)
    assert removed
    codes, scales = operands("nvfp4", 256, 256, 512)
    for seed in range(5):
        with pytest.raises(sim.SimulationError) as error:
            kernels.launch(broken, "nvfp4", 1, codes, scales, CLUSTERS, seed)
        assert error.value.kind in kinds
