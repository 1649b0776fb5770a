"""The amax kernels on the PTX machine give the CPU backend's words."""

import numpy as np
import pytest

from support import cpu_quantize as cpu
from support import device_kernels as device
from support.cpu_quantize import Placement
from support.device_kernels import Device

WHOLE = Placement()  # x is the logical tensor
DTYPES = [np.float32, np.uint16, np.float16]


@pytest.fixture(autouse=True)
def _tools() -> None:
    device.require_tools()


def check(
    x: np.ndarray, axis: int | None, chip: str, placement: Placement = WHOLE, seed: int = 0
) -> None:
    """All three results for x [examples, leads, rows, cols]; the signs are not the default ones."""
    signs = 0x3A5C
    got = device.amax(Device(chip, seed), x, rotate_axis=axis, signs=signs, placement=placement)
    want = [cpu.amax(v, rotate_axis=axis, signs=signs, placement=placement) for v in x]
    np.testing.assert_array_equal(got[0], np.concatenate([w[0] for w in want]))
    if axis is not None:
        np.testing.assert_array_equal(got[1], np.concatenate([w[1] for w in want]))
    np.testing.assert_array_equal(got[2], [w[2] for w in want])


def values(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    """Tricky values with NaN and infinities among them."""
    x = cpu.tricky_values(np.random.default_rng(seed), shape, np.dtype(dtype))
    x.reshape(-1)[:: 1 + x.size // 3] = 0x7FC0 if dtype == np.uint16 else np.nan
    x.reshape(-1)[1 :: 1 + x.size // 2] = 0xFF80 if dtype == np.uint16 else -np.inf
    return x


@pytest.mark.parametrize("axis", [None, 1, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_rotated_amax_and_fingerprint(dtype: type, axis: int | None) -> None:
    """Examples, leads, ragged rows; several tiles a CTA."""
    for number, shape in enumerate([(2, 3, 33, 17), (1, 1, 300, 64), (1, 2, 1, 129)]):
        check(values(shape, dtype, number), axis, ("100a", "120a", "80")[number], seed=number)


@pytest.mark.parametrize("axis", [None, 1, 0])
def test_fingerprint_of_a_shard_uses_logical_indices(axis: int | None) -> None:
    """The sum over shards is the sum over the tensor."""
    x = values((1, 2, 64, 96), np.float32, 4)
    total = 0
    for row in (0, 32):
        for col in (0, 48):
            part = np.ascontiguousarray(x[:, :, row : row + 32, col : col + 48])
            placement = Placement(0, row, col, 64, 96)
            check(part, axis, "100a", placement)
            total += int(device.amax(Device(), part, placement=placement)[2][0])
    assert total % (1 << 32) == cpu.amax(x[0])[2]


@pytest.mark.kernels
@pytest.mark.parametrize("chip", device.CHIPS)
@pytest.mark.parametrize("axis", [None, 1, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_sizes_and_twenty_schedules(dtype: type, axis: int | None, chip: str) -> None:
    """Sizes around groups and tiles; and one shape of several tiles in 20 orders."""
    sizes = (1, 15, 16, 17, 31, 33, 127, 128, 129, 257)
    for i, rows in enumerate(sizes):
        check(values((1, 1, rows, sizes[(3 * i + 1) % 10]), dtype, i), axis, chip)
    x = values((1, 2, 300, 130), dtype, 99)
    for seed in range(20):
        check(x, axis, chip, seed=seed)
