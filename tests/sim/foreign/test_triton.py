"""Kernels that Triton compiles run clean on the machine and give the right bits, over 20 schedules.

The compiler is not ours and does not know the machine: what it takes for granted about fragments,
barriers and layouts has to hold here. Results are compared with the oracles bit for bit.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import mma, mma_plain, pack, tables

SEEDS = range(20)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The Triton kernels, with a compile cache of this run's own."""
    pytest.importorskip("triton", reason="triton is not installed (extra `test`)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        from support import triton_kernels

        yield triton_kernels


def assert_clean(report: sim.Report) -> None:
    """No warning but of racing writes of one value, which replicated layouts make."""
    assert all("same value" in warning for warning in report.warnings), report.warnings


@pytest.mark.parametrize("chip", ["90a", "100a", "120a"])
def test_quantizer(kernels: Any, chip: str) -> None:
    """E4M3 scales and E2M1 codes of rows with zeros, subnormals, midpoints and large values."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((32, 256)) * np.exp2(rng.integers(-12, 9, (32, 1)))).astype(np.float32)
    x[0], x[1, 16:32] = 0, 1e-40
    x[2, :16] = np.arange(16) / 8 * 6 / 1.875  # scale 1: every midpoint of a coarse grid
    x[3, :16] = np.linspace(-6, 6, 16)
    kernel = kernels.compiled(
        kernels.quantize_nvfp4, int(chip.rstrip("a")), ("*fp32", "*u8", "*u8", "i32"), (16, 128)
    )
    groups = x.reshape(32, 16, 16)
    scale = tables.ue4m3_nearest(np.abs(groups).max(-1) / np.float32(6))
    value = tables.VALUES["ue4m3"][scale].astype(np.float32)
    inverse = np.divide(np.float32(1), value, out=np.zeros_like(value), where=value != 0)
    codes = tables.round_nearest("e2m1", (groups * inverse[..., None]).reshape(32, 256))
    for seed in SEEDS:
        got_codes, got_scales = np.zeros((32, 128), np.uint8), np.zeros((32, 16), np.uint8)
        assert_clean(kernel.launch(chip, (2, 2), [x, got_codes, got_scales, 256], seed))
        np.testing.assert_array_equal(got_scales, scale)
        np.testing.assert_array_equal(got_codes, pack.pack(codes, 4))


def bf16_product(a: np.ndarray, b: np.ndarray, chip: int) -> np.ndarray:
    """Bits of a [M, K] times b [N, K] transposed, in instructions of 16 along K."""
    c = np.zeros((len(a), len(b)), np.uint32)
    for k in range(0, a.shape[1], 16):
        x, y = a[:, None, k : k + 16], b[None, :, k : k + 16]
        c = mma_plain.model(("bf16", "bf16"), x, y, c, "f32", chip)
    return c


@pytest.mark.parametrize(
    ("chip", "rows", "names"),
    [
        ("80", 64, ("mma.sync", "ldmatrix", "cp.async")),
        ("120a", 64, ("mma.sync", "ldmatrix", "cp.async")),
        ("100a", 64, ("tcgen05.mma", "tcgen05.commit", "fence.proxy.async")),
        ("100a", 128, ("tcgen05.mma", "tcgen05.commit", "fence.proxy.async")),
    ],
)
def test_bf16_product(kernels: Any, chip: str, rows: int, names: tuple[str, ...]) -> None:
    """mma.sync or tcgen05.mma; tiles of 64 or 128 x 64 x 32 that M, N and K do not fill."""
    rng = np.random.default_rng(2)
    m, n, k = 96, 80, 112
    a, b = (
        tables.f32_to_bf16(rng.standard_normal((rows, k)).astype(np.float32)).astype(np.uint16)
        for rows in (m, n)
    )
    number = int(chip.rstrip("a"))
    types = ("*bf16", "*bf16", "*fp32", "i32", "i32", "i32")
    kernel = kernels.compiled(kernels.dot_bf16, number, types, (rows, 64, 32))
    assert all(name in kernel.ptx for name in names)
    want = bf16_product(a, b, number)
    for seed in SEEDS:
        c = np.full((m, n), np.nan, np.float32)
        assert_clean(kernel.launch(chip, (-(-m // rows), 2), [a, b, c, m, n, k], seed))
        np.testing.assert_array_equal(c.view(np.uint32), want)


@pytest.mark.parametrize("removed", ["cp.async.wait_group", "bar.sync"])
def test_the_product_without_its_waits_or_barriers_is_caught(kernels: Any, removed: str) -> None:
    """What makes the runs above clean: without these lines, no schedule is."""
    types = ("*bf16", "*bf16", "*fp32", "i32", "i32", "i32")
    kernel = kernels.compiled(kernels.dot_bf16, 120, types, (64, 64, 32))
    broken = re.sub(rf"^\s*{re.escape(removed)}[^;]*;", "", kernel.ptx, flags=re.MULTILINE)
    a = np.full((64, 96), 0x3F80, np.uint16)
    for seed in range(5):
        c = np.zeros((64, 64), np.float32)
        with pytest.raises(sim.SimulationError) as error:
            replace(kernel, ptx=broken).launch("120a", (1, 1), [a, a, c, 64, 64, 96], seed)
        assert error.value.kind in ("race", "uninitialized-memory")


FP4 = [("*fp8e4nv", 16, "ue4m3"), ("*u8", 32, "ue8m0")]


@pytest.mark.parametrize("chip", ["100a", "120a"])
@pytest.mark.parametrize("tiled", [False, True], ids=["linear", "tiled"])
@pytest.mark.parametrize(("scale_type", "block", "scale"), FP4, ids=["nvfp4", "mxfp4"])
def test_fp4_product(
    kernels: Any, scale_type: str, block: int, scale: str, tiled: bool, chip: str
) -> None:
    """tl.dot_scaled by block-scaled mma.sync or tcgen05.mma, with linear or 128x4 scales.

    On sm_100 linear scales go to tensor memory by tcgen05.st, tiled ones by tcgen05.cp.
    """
    rng = np.random.default_rng(block)
    m, n, k = 128, 128, 256
    codes = [rng.integers(0, 16, (rows, k)).astype(np.uint8) for rows in (m, n)]
    low, high = (0x20, 0x50) if scale == "ue4m3" else (120, 134)
    scales = [rng.integers(low, high, (rows, k // block)).astype(np.uint8) for rows in (m, n)]
    types = ("*u8", scale_type, "*u8", scale_type, "*fp32", "i32", "i32")
    kernel = kernels.compiled(
        kernels.dot_fp4_tiled if tiled else kernels.dot_fp4,
        int(chip.rstrip("a")),
        types,
        (128, 128, 128, block),
    )
    assert "block_scale" in kernel.ptx
    assert ("tcgen05.cp" in kernel.ptx) == (tiled and chip == "100a")
    given = [pack.tile_scales(s) for s in scales] if tiled else scales
    want = mma.product_k64(codes[0], codes[1], scales[0], scales[1], scale)
    packed = [pack.pack(x, 4) for x in codes]
    for seed in SEEDS:
        c = np.full((m, n), np.nan, np.float32)
        args = [packed[0], given[0], packed[1], given[1], c, n, k]
        assert_clean(kernel.launch(chip, (1, 1), args, seed))
        np.testing.assert_array_equal(c.view(np.uint32), want)
