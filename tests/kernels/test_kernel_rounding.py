"""The kernels' rounding is that of csrc/numerics: every value at which a code can change.

Blocks are built so that their scale is 1, and so the elements are rounded as they are.
"""

import numpy as np
import pytest

from oracles import tables
from support import cpu_quantize as cpu
from support import device_kernels as device
from support.cpu_quantize import Options
from support.device_kernels import Device

FORMATS = {
    "MXFP4": "e2m1",
    "MXFP6_E2M3": "e2m3",
    "MXFP6_E3M2": "e3m2",
    "MXFP8_E4M3": "e4m3",
    "MXFP8_E5M2": "e5m2",
}

# Conversions in hardware; some of them; none.
CHIPS = ["100a", *(pytest.param(chip, marks=pytest.mark.kernels) for chip in ("90", "80"))]


@pytest.fixture(autouse=True)
def _tools() -> None:
    device.require_tools()


def critical(element: str) -> np.ndarray:
    """Codes, midpoints and 256ths of steps with their neighbours, of both signs; all in range."""
    grid = tables.MAGNITUDES[element].astype(np.float64)
    steps = np.diff(grid)
    fractions = (
        grid[:-1, None] + steps[:, None] * np.arange(0, 257, 1 if len(grid) < 40 else 32) / 256
    )
    points = np.unique(np.concatenate([grid, tables.MIDPOINTS[element], fractions.reshape(-1)]))
    points = points[points <= tables.MAX[element]].astype(np.float32)
    near = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    tiny = np.array([0, 1e-45, 1e-38, 2e-38], np.float32)
    magnitudes = np.concatenate([*near, tiny])
    magnitudes = magnitudes[magnitudes <= tables.MAX[element]]
    return np.concatenate([magnitudes, -magnitudes])


def blocks_of_scale_one(x: np.ndarray, element: str) -> np.ndarray:
    """Rows [n, 32] of the values, each led by the largest value of the element."""
    n = -(-len(x) // 31)
    rows = np.zeros((n, 32), np.float32)
    rows[:, 0] = tables.MAX[element]
    rows[:, 1:] = np.resize(x, (n, 31))
    return rows


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_nearest(name: str, chip: str) -> None:
    """To the even code, for both instructions and software."""
    element = FORMATS[name]
    rows = blocks_of_scale_one(critical(element), element)
    o = Options(name)
    (got,) = device.quantize(Device(chip), rows[None], o)
    assert (got.scales == 127).all()
    codes = tables.round_nearest(element, rows)
    (want,) = cpu.quantize(rows[None], o)
    assert want.equals(got)
    if o.bits == 8:
        np.testing.assert_array_equal(got.values[0], codes)
    elif o.bits == 4:
        np.testing.assert_array_equal(got.values[0], codes[:, ::2] | codes[:, 1::2] << 4)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_stochastic(name: str, chip: str) -> None:
    """Eight random bits against the first eight discarded ones, for several draws of each value."""
    element = FORMATS[name]
    rows = blocks_of_scale_one(critical(element), element)
    draws = 3 if name == "MXFP4" and chip != "80" else 1
    for seed in range(draws):
        o = Options(name, stochastic=True, seed=seed)
        (got,) = device.quantize(Device(chip), rows[None], o)
        assert got.equals(cpu.quantize(rows[None], o)[0])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("output", [np.float32, np.uint16, np.float16])
@pytest.mark.parametrize("name", cpu.FORMATS)
def test_decoding_every_code_with_many_scales(name: str, output: type, chip: str) -> None:
    """All codes, NaNs and infinities among them, times every scale byte, at two tensor scales."""
    o = Options(name)
    codes = np.resize(np.arange(1 << o.bits, dtype=np.uint8), (256, 256))
    k = 256
    if o.bits == 8:
        values = codes
    elif o.bits == 4:
        values = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        four = codes.reshape(256, 64, 4).astype(np.uint32) << np.arange(0, 24, 6, dtype=np.uint32)
        word = four.sum(-1, dtype=np.uint32)[..., None]
        values = (word >> np.array([0, 8, 16], np.uint32) & 0xFF).astype(np.uint8).reshape(256, -1)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], k // o.block, 1)
    if o.block == 16:
        scales &= 0x7F
    for factor in (1.0, 3e-5):
        q = cpu.Result(
            np.ascontiguousarray(values)[None],
            np.ascontiguousarray(scales).reshape(1, -1),
            np.array([factor], np.float32),
        )
        got = device.dequantize(Device(chip), q, o, 256, k, np.dtype(output))
        want = cpu.dequantize(q, o, 256, k, np.dtype(output))
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (17, 31), (33, 257), (130, 16)])
def test_decoding_ragged_rows(shape: tuple[int, int], tiled: bool) -> None:
    """Outputs have no padding, so rows begin at any address; two matrices, one CTA in y."""
    x = cpu.tricky_values(np.random.default_rng(2), (2, *shape), np.dtype(np.float32))
    o = Options(tiled_layout=tiled)
    (q,) = cpu.quantize(x, o)
    for output in (np.float32, np.float16):
        got = device.dequantize(Device("120a"), q, o, *shape, np.dtype(output), max_y=1)
        assert got.tobytes() == cpu.dequantize(q, o, *shape, np.dtype(output)).tobytes()
