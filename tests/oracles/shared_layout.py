"""Where the canonical layouts of matrix descriptors put the elements of a matrix.

Written from the PTX ISA 9.7.16.3 and 9.7.16.4.1: every layout is a shape and a stride for each of
the two coordinates, in units of elements of which T fill 16 bytes, and a permutation of the 16-byte
chunks of each 128-byte line.
"""

from dataclasses import dataclass

import numpy as np

# Code in bits 63:61, and bytes of a row of the pattern.
SWIZZLES = {"none": (0, 16), "128B_atom_32B": (1, 128), "128B": (2, 128), "64B": (4, 64)} | {
    "32B": (6, 32)
}


@dataclass(frozen=True)
class Descriptor:
    """The fields of a matrix descriptor; addresses and offsets in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: str = "none"

    @property
    def bits(self) -> int:
        """The 64-bit value."""
        fields = self.start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32
        return fields | 1 << 46 | SWIZZLES[self.swizzle][0] << 61


def permute_chunks(address: np.ndarray, swizzle: str) -> np.ndarray:
    """Byte addresses after the chunk permutation of their 128-byte line."""
    line, chunk, byte = address // 128, address // 16 % 8, address % 16
    if swizzle == "128B":
        chunk = chunk ^ line % 8
    elif swizzle == "64B":
        chunk = chunk ^ line % 4
    elif swizzle == "32B":
        chunk = chunk ^ line % 2
    elif swizzle == "128B_atom_32B":
        chunk = (chunk // 2 ^ line % 4) * 2 + chunk % 2
    return line * 128 + chunk * 16 + byte


def bit_addresses(d: Descriptor, major: str, rows: int, columns: int, bits: int) -> np.ndarray:
    """The address of every element in bits, [rows, columns].

    Args:
        d: the descriptor.
        major: "k" or "mn".
        rows: of M or N.
        columns: of K.
        bits: of an element with its padding: 4, 8, 16 or 32.
    """
    t = 128 // bits
    width = SWIZZLES[d.swizzle][1] * 8 // bits  # elements of a row of the pattern
    leading, stride = (offset * 8 // bits for offset in (d.leading, d.stride))
    k_rows = 4 if d.swizzle == "128B_atom_32B" else 8
    # (shape, stride) pairs, innermost first; the last shape is unbounded.
    if major == "k":
        inner_k = [(t, 1), (None, leading if d.swizzle == "none" else t)]
        layout = [(8, width), (None, stride)], inner_k
    elif d.swizzle == "none":
        layout = [(t, 1), (None, stride)], [(8, t), (None, leading)]
    else:
        layout = [(t, 1), (width // t, t), (None, leading)], [(k_rows, width), (None, stride)]
    total = np.zeros((rows, columns), np.int64)
    for modes, coordinate in zip(
        layout, (np.arange(rows)[:, None], np.arange(columns)[None]), strict=True
    ):
        rest = coordinate
        for shape, step in modes:
            inside = rest if shape is None else rest % shape
            total = total + inside * step
            rest = rest * 0 if shape is None else rest // shape
    address = d.start * 8 + total * bits
    return permute_chunks(address // 8, d.swizzle) * 8 + address % 8
