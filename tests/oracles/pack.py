"""How codes lie in rows of bytes, and where the scale of (row, block) lies in the tiled layout.

Written with bit strings and coordinate lists rather than offsets, so that it shares no formula
with the implementation.
"""

import numpy as np


def row_bytes(bits: int, k: int) -> int:
    """Bytes of a row of k codes: padded to 16 bytes (4- and 8-bit codes) or 96 (6-bit codes)."""
    pitch = 96 if bits == 6 else 16
    used = -(-k * bits // 8)
    return -(-used // pitch) * pitch


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [R, K] codes -> uint8 [R, row_bytes]; the row is one little-endian bit string.

    Code k occupies bits k*bits .. k*bits + bits - 1, bit 0 being the lowest bit of byte 0: even
    elements of 4-bit formats in the low nibble, four 6-bit codes in three bytes.
    """
    rows, k = codes.shape
    bit_string = np.zeros((rows, row_bytes(bits, k) * 8), np.uint8)
    for b in range(bits):
        bit_string[:, b : k * bits : bits] = (codes >> b) & 1
    return np.packbits(bit_string, axis=1, bitorder="little")


def unpack(packed: np.ndarray, bits: int, k: int) -> np.ndarray:
    """The first k codes of every row."""
    bit_string = np.unpackbits(packed, axis=1, bitorder="little")[:, : k * bits]
    weights = 1 << np.arange(bits)
    return (bit_string.reshape(len(packed), k, bits) * weights).sum(axis=-1).astype(np.uint8)


def tile_scales(linear: np.ndarray) -> np.ndarray:
    """uint8 [R, S] -> [ceil(R/128), ceil(S/4), 32, 4, 4]; rows and blocks that do not exist are 0.

    Row r = 128 * tile + 32 * quarter + lane lies at [tile, :, lane, quarter, :].
    """
    rows, blocks = linear.shape
    row_tiles, block_tiles = -(-rows // 128), -(-blocks // 4)
    padded = np.zeros((row_tiles * 128, block_tiles * 4), np.uint8)
    padded[:rows, :blocks] = linear
    return padded.reshape(row_tiles, 4, 32, block_tiles, 4).transpose(0, 3, 2, 1, 4).copy()


def untile_scales(tiled: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """The inverse of `tile_scales`."""
    row_tiles, block_tiles = tiled.shape[:2]
    linear = tiled.transpose(0, 3, 2, 1, 4).reshape(row_tiles * 128, block_tiles * 4)
    return linear[:rows, :blocks].copy()
