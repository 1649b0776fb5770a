"""The random Hadamard transform of 16 values."""

import ctypes

import numpy as np
import pytest

from oracles import quantizer, tables
from support.numerics_library import NumericsLibrary

DEFAULT = 0b1101_0111_1110_1000
# Sylvester's matrix by its definition: the parity of the bits that row and column share.
H16 = np.array([[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])


def rotate(numerics: NumericsLibrary, x: np.ndarray, signs: int) -> np.ndarray:
    out = np.empty_like(x)
    numerics.call("rotate_groups", x, signs, out, np.int64(len(x)))
    return out


def sign_vector(signs: int) -> list[int]:
    return [-1 if (signs >> i) & 1 else 1 for i in range(16)]


def test_default_signs_are_those_of_transformer_engine(numerics: NumericsLibrary) -> None:
    """1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1; bit i stands for element i."""
    expected = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    assert sign_vector(numerics.call("default_signs", result=ctypes.c_uint)) == expected
    assert list(quantizer.DEFAULT_SIGNS) == expected


@pytest.mark.parametrize("signs", [DEFAULT, 0, 0xFFFF, 0x1234])
def test_one_hots_give_the_rows_of_the_matrix(numerics: NumericsLibrary, signs: int) -> None:
    """Row i of diag(signs) * H16 / 4, exactly: the order of rows and columns is fixed."""
    rotated = rotate(numerics, np.eye(16, dtype=np.float32), signs)
    expected = np.diag(sign_vector(signs)) @ H16 / 4
    np.testing.assert_array_equal(rotated, expected)


@pytest.mark.parametrize("signs", [DEFAULT, 0x1234])
def test_rotation_is_orthogonal(numerics: NumericsLibrary, signs: int) -> None:
    """Rotating both operands leaves products of small integers as they are, exactly."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (64, 16)).astype(np.float32) for _ in "ab")
    # Sums of 16 integers below 4 in quarters need 8 bits: bf16 holds them.
    a_rotated, b_rotated = rotate(numerics, a, signs), rotate(numerics, b, signs)
    np.testing.assert_array_equal(a_rotated @ b_rotated.T, a @ b.T)


def test_signs_of_both_operands_must_agree(numerics: NumericsLibrary) -> None:
    """With the sign vector of one operand flipped somewhere the product changes."""
    a = np.random.default_rng(1).integers(-3, 4, (4, 16)).astype(np.float32)
    left, right = rotate(numerics, a, DEFAULT), rotate(numerics, a, DEFAULT ^ 0x0010)
    assert not np.array_equal(left @ right.T, a @ a.T)


def test_ones_concentrate_in_one_element(numerics: NumericsLibrary) -> None:
    """A block of ones (signs 0) becomes (4, 0, 0, ...): amax must be taken after the rotation."""
    rotated = rotate(numerics, np.ones((1, 16), np.float32), 0)
    assert rotated.tolist() == [[4.0] + [0.0] * 15]


@pytest.mark.parametrize("spread", [0, 8, 40])
@pytest.mark.parametrize("signs", [DEFAULT, 0x1234])
def test_every_sum_rounds_in_the_defined_order(
    numerics: NumericsLibrary, spread: int, signs: int
) -> None:
    """Values up to 2 * 40 binades apart give the oracle's bits: f32 butterflies, then bf16."""
    rng = np.random.default_rng(spread)
    x = rng.standard_normal((4096, 16)) * np.exp2(rng.integers(-spread, spread + 1, (4096, 16)))
    x = x.astype(np.float32)
    expected = quantizer.rotate(x, sign_vector(signs))
    rotated = rotate(numerics, x, signs)
    np.testing.assert_array_equal(rotated.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(rotated, tables.round_to_bf16(rotated))


def test_subnormals_are_kept_and_infinities_spread(numerics: NumericsLibrary) -> None:
    """The smallest subnormals are not flushed; one Inf makes its whole group non-finite."""
    x = np.full((1, 16), np.float32(2.0**-133))
    assert rotate(numerics, x, 0)[0, 0] == np.float32(2.0**-131)
    x[0, 3] = np.inf
    assert not np.isfinite(rotate(numerics, x, DEFAULT)).any()
