"""The native search for NVFP4 scales: every CPU level finds the same, and writes its outputs only.

That what it finds is best is the business of test_convert.py.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _native
from support import cpu_quantize

LEVELS = ["portable", *([] if fp4.best_cpu_level() == "portable" else [fp4.best_cpu_level()])]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# Tails of a vector's 8 blocks, and of the 32 groups that are encoded at once.
BLOCKS = (1, 7, 8, 9, 31, 32, 33, 71)


def search(
    level: str, x: np.ndarray, amax: float, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(scales, values) at a CPU level, whose outputs lie between canaries."""
    outputs = [
        cpu_quantize.Guarded(scales.size, 0x55),
        cpu_quantize.Guarded(len(x) * cpu_quantize.row_bytes(4, x.shape[1]), 0x55),
    ]
    found, values = (o.bytes.reshape(len(x), -1) for o in outputs)
    found[:] = scales
    _native.force_cpu_level(level)
    try:
        _native.search_nvfp4(x, amax, found, values)
    finally:
        _native.force_cpu_level("")
    for output in outputs:
        output.check()
    return found, values


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_finds_the_same_scales(dtype: str) -> None:
    """Tricky values and first scales of any byte, 0 and NaN among them; any tensor amax."""
    generator = np.random.default_rng(11)
    for blocks, amax in itertools.product(BLOCKS, (0.0, 1e-40, 1e-3, 6.0, 3e38)):
        kind = np.dtype(np.float16 if dtype == "float16" else np.float32)
        x = cpu_quantize.tricky_values(generator, (5, 16 * blocks), kind).astype(DTYPES[dtype])
        scales = generator.integers(0, 0x80, (5, blocks), np.uint8)
        for share, special in ((0.1, 0), (0.1, 0x7F)):
            scales[generator.random(scales.shape) < share] = special
        # A block that is not finite has the NaN scale.
        bad = ~np.isfinite(x.astype(np.float32)).reshape(5, blocks, 16).all(axis=-1)
        scales[bad] = 0x7F
        expected, *others = (search(level, x, amax, scales) for level in LEVELS)
        for found in others:
            assert all(map(np.array_equal, found, expected)), (blocks, amax)
        fixed = (scales == 0) | (scales == 0x7F)
        assert (expected[0][fixed] == scales[fixed]).all()
        assert not expected[1][:, : 8 * blocks].reshape(5, blocks, 8)[scales == 0x7F].any()


def test_the_search_refuses_arrays_that_do_not_fit() -> None:
    """Sizes are checked before memory is touched."""
    x, scales, values = np.ones((2, 32), np.float32), np.ones((2, 2), np.uint8), np.zeros((2, 16))
    for wrong in (values[:, :8], values[:1]):
        with pytest.raises(ValueError, match="shapes of x, scales and values"):
            _native.search_nvfp4(x, 1.0, scales, np.ascontiguousarray(wrong, np.uint8))
    with pytest.raises(ValueError, match="dtype"):
        _native.search_nvfp4(x.astype(np.float64), 1.0, scales, values.astype(np.uint8))
