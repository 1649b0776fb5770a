"""Matrix descriptors: where every chunk lies, and what is refused.

The addresses come from tests/oracles/shared_layout.py.
"""

import ctypes
import functools

import numpy as np
import pytest

from oracles.shared_layout import SWIZZLES, Descriptor, bit_addresses
from support.native import shared_library
from support.repository import ROOT


@functools.cache
def library() -> ctypes.CDLL:
    """The decoder alone, without a machine."""
    source = ROOT / "csrc" / "sim" / "ops" / "matrix_descriptor.cc"
    return shared_library(
        "matrix_descriptor", [source, ROOT / "tests" / "sim" / "matrix_descriptor_c.cc"], "-O1"
    )


def chunks(bits: int, major: str, mn_count: int, k_count: int) -> np.ndarray | tuple[str, str]:
    """Addresses [mn_count, k_count], or the kind and the text of the error."""
    out = np.zeros((mn_count, k_count), np.uint32)
    text = ctypes.create_string_buffer(400)
    status = library().c_chunks(
        ctypes.c_uint64(bits), major == "mn", mn_count, k_count,
        ctypes.c_void_p(out.ctypes.data), text, 400,
    )  # fmt: skip
    return (("argument", "misaligned")[status - 1], text.value.decode()) if status else out


def expected(d: Descriptor, major: str, mn_count: int, k_count: int) -> np.ndarray:
    """The same from the oracle, with bytes as elements."""
    if major == "k":
        bits = bit_addresses(d, "k", mn_count, 16 * k_count, 8)[:, ::16]
    else:
        bits = bit_addresses(d, "mn", 16 * mn_count, k_count, 8)[::16]
    return bits // 8


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_k_major_chunks(swizzle: str) -> None:
    """Two chunks of each of up to 256 rows, at every step along K inside a row of the pattern."""
    if swizzle == "128B_atom_32B":
        kind, text = chunks(Descriptor(0, 0, 1024, swizzle).bits, "k", 8, 2)
        assert kind == "argument" and "K-major" in text
        return
    rng = np.random.default_rng(1)
    width = SWIZZLES[swizzle][1]
    steps = range(0, width - 31, 16) if swizzle != "none" else (0,)
    for step in steps:
        for rows in (8, 16, 24, 128, 248, 256):
            stride = int(rng.integers(0, 16)) * (width * 8 if swizzle != "none" else 16)
            leading = int(rng.integers(0, 1 << 14)) * 16
            start = int(rng.integers(0, 64)) * 1024 + step
            d = Descriptor(start, leading, stride, swizzle)
            np.testing.assert_array_equal(chunks(d.bits, "k", rows, 2), expected(d, "k", rows, 2))


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_mn_major_chunks(swizzle: str) -> None:
    """Up to 16 chunks along M or N for 8, 16 and 32 k."""
    rng = np.random.default_rng(2)
    unit = 1024 if swizzle != "none" else 16
    for units in (1, 2, 4, 8, 16, 32):
        for k in (8, 16, 32):
            leading, stride = (int(n) * unit for n in rng.integers(0, 16, 2))
            start = int(rng.integers(0, 64)) * 1024
            d = Descriptor(start, leading, stride, swizzle)
            np.testing.assert_array_equal(
                chunks(d.bits, "mn", units, k), expected(d, "mn", units, k)
            )


def test_a_part_of_a_row_of_an_mn_major_matrix() -> None:
    """A start inside a row of the pattern is fine as long as the row holds all that is read."""
    d = Descriptor(1024 + 64, 4096, 1024, "128B")
    np.testing.assert_array_equal(chunks(d.bits, "mn", 4, 16), expected(d, "mn", 4, 16))


def test_the_base_offset_means_nothing_without_a_swizzle() -> None:
    """Triton leaves bits 9:7 of the address there (PTX ISA: valid with a swizzle only)."""
    d = Descriptor(2048 + 512, 128, 256, "none")
    for offset in range(8):
        got = chunks(d.bits | offset << 49, "k", 16, 2)
        np.testing.assert_array_equal(got, expected(d, "k", 16, 2))


GOOD = Descriptor(2048, 16, 1024, "128B").bits


@pytest.mark.parametrize(
    ("bits", "kind", "text"),
    [
        (GOOD | 1 << 14, "argument", "bits 15:14 are 1, expected 0 (reserved)"),
        (GOOD | 1 << 31, "argument", "bits 31:30 are 2, expected 0 (reserved)"),
        (GOOD & ~(1 << 46), "argument", "bits 48:46 are 0, expected 1"),
        (GOOD | 1 << 47, "argument", "bits 48:46 are 3, expected 1"),
        (GOOD | 5 << 49, "argument", "bits 51:49 are 5, expected 0 (the matrix base offset"),
        (GOOD | 1 << 52, "argument", "bits 52:52 are 1, expected 0 (the absolute leading"),
        (GOOD | 1 << 60, "argument", "bits 60:53 are 128, expected 0 (reserved)"),
        (GOOD | 1 << 61, "argument", "swizzle (bits 63:61) is 3; expected 0, 1, 2, 4 or 6"),
        (Descriptor(2048 + 128, 0, 1024, "128B").bits, "misaligned", "not in the first row"),
        (Descriptor(2048 + 64, 0, 512, "64B").bits, "misaligned", "multiple of 512 bytes"),
        (Descriptor(2048 + 32, 0, 256, "32B").bits, "misaligned", "multiple of 256 bytes"),
        (Descriptor(2048 + 112, 0, 1024, "128B").bits, "misaligned", "is 112 bytes into a row"),
        (
            Descriptor(2048, 0, 512, "128B").bits,
            "misaligned",
            "offset 512 is not a multiple of 1024",
        ),
    ],
)
def test_what_is_refused(bits: int, kind: str, text: str) -> None:
    """Every constant bit, every swizzle that does not exist, every pattern off its boundary."""
    assert isinstance(chunks(GOOD, "k", 16, 2), np.ndarray)
    got = chunks(bits, "k", 16, 2)
    assert isinstance(got, tuple)
    assert got[0] == kind and text in got[1]
