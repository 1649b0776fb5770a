"""Philox and the random bits of a group of 16."""

import numpy as np
import pytest

from oracles import quantizer
from support.numerics_library import NumericsLibrary

# Random123's known-answer vectors for philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    numerics: NumericsLibrary,
    counter: tuple[int, ...],
    key: tuple[int, int],
    expected: tuple[int, ...],
) -> None:
    """Both the headers and the oracle give Random123's published vectors."""
    out = np.empty(4, np.uint32)
    numerics.call("philox", np.array(counter, np.uint32), *map(np.uint32, key), out)
    assert tuple(out.tolist()) == expected
    assert tuple(quantizer.philox4x32_10(counter, key).tolist()) == expected


def rounding_bytes(
    numerics: NumericsLibrary, seed: int, groups: np.ndarray, stream: int
) -> np.ndarray:
    out = np.empty((len(groups), 16), np.uint8)
    n = np.int64(len(groups))
    numerics.call("rounding_bytes", np.uint64(seed), groups, np.uint32(stream), out, n)
    return out


def test_byte_j_of_a_group_is_byte_j_of_its_words(numerics: NumericsLibrary) -> None:
    """Group numbers above 2^32 use the second counter word, `stream` the third; seed low first."""
    seed, stream = 0x0123456789ABCDEF, 5
    groups = np.array([0, 1, 2**32 - 1, 2**32, 2**40 + 3, 2**64 - 1], np.uint64)
    expected = np.empty((len(groups), 16), np.uint8)
    for i, group in enumerate(map(int, groups)):
        counter = (group & 0xFFFFFFFF, group >> 32, stream, 0)
        words = quantizer.philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32)).tolist()
        expected[i] = [(words[j // 4] >> (8 * (j % 4))) & 0xFF for j in range(16)]
    np.testing.assert_array_equal(rounding_bytes(numerics, seed, groups, stream), expected)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    np.testing.assert_array_equal(quantizer.random_bytes(groups, key, stream), expected)


def test_random_bits_depend_on_seed_stream_and_group(numerics: NumericsLibrary) -> None:
    """Changing either seed word, the stream or the group changes the bytes."""
    group = np.array([7], np.uint64)
    drawn = [
        rounding_bytes(numerics, seed, g, stream).tobytes()
        for seed, g, stream in (
            (3, group, 0),
            (4, group, 0),
            (3 + 2**32, group, 0),
            (3, group + np.uint64(1), 0),
            (3, group + np.uint64(2**32), 0),
            (3, group, 1),
        )
    ]
    assert len(set(drawn)) == len(drawn)


def test_random_bytes_are_uniform(numerics: NumericsLibrary) -> None:
    """Each byte value occurs as often as chance allows, at each of the 16 places."""
    n = 1 << 16
    drawn = rounding_bytes(numerics, 99, np.arange(n, dtype=np.uint64), 0)
    for place in range(16):
        counts = np.bincount(drawn[:, place], minlength=256)
        chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
        # 255 degrees of freedom: mean 255, standard deviation 22.6; six of them either way.
        assert 255 - 6 * 22.6 < chi_square < 255 + 6 * 22.6
