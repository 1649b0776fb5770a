"""Packed rows and the two layouts of scales."""

import ctypes

import numpy as np
import pytest

from oracles import pack, tables
from support.numerics_library import ELEMENTS, LAYOUTS, NumericsLibrary

TILED = LAYOUTS.index("tiled")


@pytest.mark.parametrize("element", ELEMENTS)
def test_rows_are_packed_as_little_endian_bit_strings(
    numerics: NumericsLibrary, element: str
) -> None:
    """Bytes equal the oracle's for every length up to 260, and loading gives the codes back."""
    rng = np.random.default_rng(0)
    width = tables.KINDS[element].bits
    number = ELEMENTS.index(element)
    for k in range(261):
        codes = rng.integers(0, 1 << width, k).astype(np.uint8)
        size = numerics.call("packed_row_bytes", number, np.int64(k), result=ctypes.c_int64)
        assert size == pack.row_bytes(width, k)
        row = np.zeros(size, np.uint8)
        numerics.call("pack_row", number, codes, row, np.int64(k))
        np.testing.assert_array_equal(row, pack.pack(codes[None], width)[0])
        back = np.empty(k, np.uint8)
        numerics.call("unpack_row", number, row, back, np.int64(k))
        np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize(
    ("element", "k", "expected"),
    [
        ("e2m1", 0, 0), ("e2m1", 1, 16), ("e2m1", 32, 16), ("e2m1", 33, 32),
        ("e2m3", 1, 96), ("e3m2", 128, 96), ("e3m2", 129, 192),
        ("e4m3", 1, 16), ("e5m2", 16, 16), ("e5m2", 17, 32),
    ],
)  # fmt: skip
def test_row_pitch_by_hand(numerics: NumericsLibrary, element: str, k: int, expected: int) -> None:
    """Rows are padded to 16 bytes, or 96 where codes have 6 bits."""
    number = ELEMENTS.index(element)
    size = numerics.call("packed_row_bytes", number, np.int64(k), result=ctypes.c_int64)
    assert size == expected


def offsets(
    numerics: NumericsLibrary, layout: int, rows: np.ndarray, blocks: np.ndarray, per_row: int
) -> np.ndarray:
    rows, blocks = (np.ascontiguousarray(v, np.int64) for v in (rows, blocks))
    out = np.empty(rows.shape, np.int64)
    numerics.call(
        "scale_offsets", layout, rows, blocks, np.int64(per_row), out, np.int64(rows.size)
    )
    return out


# (row, block, blocks in a row) -> byte. The first eight are the corners of one 512-byte atom as
# the PTX ISA draws it: 16 bytes a lane, four rows 32 apart side by side, four blocks each.
TILED_BY_HAND = [
    ((0, 0, 4), 0),
    ((0, 3, 4), 3),
    ((1, 0, 4), 16),
    ((31, 0, 4), 496),
    ((32, 0, 4), 4),
    ((64, 1, 4), 9),
    ((96, 0, 4), 12),
    ((127, 3, 4), 511),
    ((0, 4, 8), 512),
    ((33, 6, 8), 534),
    ((128, 0, 8), 1024),
    ((128, 0, 5), 1024),
    ((128, 0, 4), 512),
    ((255, 7, 8), 2047),
    # Beyond 32 bits: the last scale of a 262,144 x 1,048,576 tensor.
    ((262143, 65535, 65536), 262144 * 65536 - 1),
]


@pytest.mark.parametrize(("index", "expected"), TILED_BY_HAND)
def test_tiled_offsets_by_hand(
    numerics: NumericsLibrary, index: tuple[int, int, int], expected: int
) -> None:
    """Offsets copied by hand from the layout's definition."""
    row, block, per_row = index
    found = offsets(numerics, TILED, np.array([row]), np.array([block]), per_row)
    assert found.tolist() == [expected]


@pytest.mark.parametrize("rows", [1, 5, 31, 32, 33, 127, 128, 129, 257])
@pytest.mark.parametrize("blocks", [1, 3, 4, 5, 8, 13])
def test_tiled_layout_is_injective_and_equals_the_oracle(
    numerics: NumericsLibrary, rows: int, blocks: int
) -> None:
    """No two scales share a byte, none lies outside, and each lies where the oracle puts it."""
    r, b = np.mgrid[:rows, :blocks]
    where = offsets(numerics, TILED, r, b, blocks)
    size = numerics.call(
        "scale_tensor_bytes", TILED, np.int64(rows), np.int64(blocks), result=ctypes.c_int64
    )
    assert len(np.unique(where)) == rows * blocks
    assert 0 <= where.min() and where.max() < size
    linear = np.random.default_rng(1).integers(1, 256, (rows, blocks)).astype(np.uint8)
    tiled = np.zeros(size, np.uint8)
    tiled[where] = linear
    expected = pack.tile_scales(linear)
    np.testing.assert_array_equal(tiled, expected.ravel())
    np.testing.assert_array_equal(pack.untile_scales(expected, rows, blocks), linear)


def test_linear_layout_is_row_major(numerics: NumericsLibrary) -> None:
    """Offset row * blocks + block, size rows * blocks."""
    r, b = np.mgrid[:5, :7]
    where = offsets(numerics, LAYOUTS.index("linear"), r, b, 7)
    np.testing.assert_array_equal(where, np.arange(35).reshape(5, 7))
    size = numerics.call("scale_tensor_bytes", 0, np.int64(5), np.int64(7), result=ctypes.c_int64)
    assert size == 35
