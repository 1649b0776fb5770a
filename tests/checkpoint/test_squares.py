"""The squares of a conversion's report: those of the dequantized rows, at every CPU level."""

import ml_dtypes
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _native
from jax_fp4.convert import quantizing

LEVELS = ["portable", *([] if fp4.best_cpu_level() == "portable" else [fp4.best_cpu_level()])]


@pytest.mark.parametrize("format", fp4.FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_squares_are_those_of_the_dequantized_rows(format: fp4.Format, dtype: type) -> None:
    """Rows of several pieces and of a part of one, against f64; every level has the same bits.

    A part sums at most 256 squares in f32, and every square is rounded twice: 258 * 2**-24 of a
    sum of positive numbers.
    """
    x = np.random.default_rng(5).standard_normal((3, 2048 + 96)).astype(dtype)
    slab = quantizing.quantize_rows(x, format, "nearest", quantizing.amax(x), "gpt-oss")
    found = []
    for level in LEVELS:
        _native.force_cpu_level(level)
        found.append(quantizing.squares(x, slab))
    _native.force_cpu_level("")
    q = fp4.quantize(x, format, amax=quantizing.amax(x) if format.tensor_scaled else None)
    wide = x.astype(np.float64)
    value = np.asarray(fp4.dequantize(q, np.float32)).astype(np.float64)
    expected = ((value - wide) ** 2).sum(), (wide**2).sum()
    assert len(set(found)) == 1
    # A difference of f32 numbers is rounded once more, by 2**-24 of itself.
    for have, want in zip(found[0], expected, strict=True):
        assert abs(have - want) <= 260 * 2.0**-24 * want


def test_squares_refuse_arrays_that_do_not_fit() -> None:
    """Sizes are checked before memory is touched."""
    x, values, scales = (
        np.ones((2, 32), np.float32),
        np.zeros((2, 16), np.uint8),
        np.ones((2, 2), np.uint8),
    )
    for wrong in (values[:1], values[:, :8]):
        with pytest.raises(ValueError, match="do not go together"):
            _native.squares(x, fp4.NVFP4.attribute(), np.ascontiguousarray(wrong), scales, 1.0)
