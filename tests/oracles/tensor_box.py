"""What a tensor copy moves, by the text of the PTX ISA (5.5) and of cuda.h, element by element.

Bytes of shared memory are named by the offset from where the box starts; elements by
their bits, so that types of 4 and 6 bits need no case of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

# Type: bits of an element, bytes that 16 elements take in shared memory.
TYPES = {
    "uint8": (8, 16), "uint16": (16, 32), "uint32": (32, 64), "int32": (32, 64),
    "uint64": (64, 128), "int64": (64, 128), "float16": (16, 32), "float32": (32, 64),
    "float64": (64, 128), "bfloat16": (16, 32), "16u4_align8b": (4, 8),
    "16u4_align16b": (4, 16), "16u6_align16b": (6, 16),
}  # fmt: skip
NAN = {
    "float16": b"\xff\x7f", "bfloat16": b"\xff\x7f", "float32": b"\xff\xff\xff\x7f",
    "float64": b"\xff" * 7 + b"\x7f",
}  # fmt: skip
# Swizzle: bytes of a row, bytes of an atom, atoms that change places.
SWIZZLES = {
    "none": (0, 16, 1), "32b": (32, 16, 2), "64b": (64, 16, 4), "128b": (128, 16, 8),
    "128b_atom_32b": (128, 32, 4), "128b_atom_32b_flip_8b": (128, 32, 4),
    "128b_atom_64b": (128, 64, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor map; the innermost dimension first, strides in bytes from the second on."""

    data_type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    element_strides: tuple[int, ...] = ()
    oob_fill: str = "zeros"

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from one copied element to the next; never more than 1 in dimension 0."""
        return (1, *self.element_strides[1:]) if self.element_strides else (1,) * len(self.dims)

    @property
    def counts(self) -> tuple[int, ...]:
        """Copied elements in each dimension."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=True))

    @property
    def elements(self) -> int:
        return int(np.prod(self.counts))

    @property
    def copied_bytes(self) -> int:
        return self.elements * TYPES[self.data_type][0] // 8

    @property
    def shared_bytes(self) -> int:
        return self.elements * TYPES[self.data_type][1] // 16


def elements_of(
    tensor: Tensor, coordinates: Sequence[int], rows: Sequence[int] | None = None
) -> Iterator[tuple[int, int | None]]:
    """(number in the box, bit address in global memory or None) of every copied element."""
    bits = TYPES[tensor.data_type][0]
    if rows is None:
        outer = [
            tuple(
                c + k * s for c, k, s in zip(coordinates[1:], index, tensor.steps[1:], strict=True)
            )
            for index in (r[::-1] for r in product(*(range(n) for n in tensor.counts[:0:-1])))
        ]
    else:
        outer = [(r,) for r in rows]
    for number, place in enumerate(outer):
        outside = any(not 0 <= x < d for x, d in zip(place, tensor.dims[1:], strict=True))
        start = sum(x * s for x, s in zip(place, tensor.strides, strict=True))
        for k in range(tensor.counts[0]):
            x = coordinates[0] + k
            hole = outside or not 0 <= x < tensor.dims[0]
            yield number * tensor.counts[0] + k, None if hole else start * 8 + x * bits


def swizzled(offset: int, swizzle: str, base: int) -> int:
    """Where the byte at an offset of the box lies, if the box starts at shared address `base`."""
    span, atom, atoms = SWIZZLES[swizzle]
    if span == 0:
        return offset
    line, within = divmod(base + offset, 128)
    number, inside = divmod(within, atom)
    group, member = divmod(number, atoms)
    # 32B and 64B swizzling have several groups of atoms in a line of 128 bytes.
    member ^= line % atoms
    if swizzle.endswith("flip_8b") and line % 2:
        inside ^= 8
    return line * 128 + (group * atoms + member) * atom + inside - base


def image(
    tensor: Tensor,
    memory: np.ndarray,
    coordinates: Sequence[int],
    base: int,
    rows: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of shared memory after a load, and which of them it writes.

    Args:
        tensor: the map.
        memory: uint8, what lies at the tensor's address.
        coordinates: of the box.
        base: shared address of the box.
        rows: of .tile::gather4.

    Returns:
        The bytes, and a mask.
    """
    bits, sixteen = TYPES[tensor.data_type]
    copies = 1 if rows is None else 4
    size = tensor.shared_bytes * copies
    stream = np.unpackbits(memory, bitorder="little")
    linear = np.zeros(size * 8, np.uint8)
    used = np.zeros(size * 8, bool)
    nan = np.unpackbits(
        np.frombuffer(NAN.get(tensor.data_type, b"\0" * 8), np.uint8), bitorder="little"
    )
    for number, at in elements_of(tensor, coordinates, rows):
        to = number // 16 * sixteen * 8 + number % 16 * bits
        used[to : to + bits] = True
        if at is not None:
            linear[to : to + bits] = stream[at : at + bits]
        elif tensor.oob_fill == "nan":
            linear[to : to + bits] = nan
    data, written = np.packbits(linear, bitorder="little"), used.reshape(-1, 8).any(1)
    places = np.array([swizzled(k, tensor.swizzle, base) for k in range(size)])
    result, mask = np.zeros(size, np.uint8), np.zeros(size, bool)
    result[places], mask[places] = data, written
    return result, mask


def linear_of(shared: np.ndarray, swizzle: str, base: int) -> np.ndarray:
    """The bytes of a box without its swizzle."""
    return shared[[swizzled(k, swizzle, base) for k in range(shared.size)]]


def stored(
    tensor: Tensor,
    memory: np.ndarray,
    shared: np.ndarray,
    coordinates: Sequence[int],
    base: int,
    rows: Sequence[int] | None = None,
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """The tensor's memory after a box of shared memory was stored, or reduced into it.

    Args:
        tensor: the map.
        memory: uint8, what lies at the tensor's address.
        shared: uint8, the box.
        coordinates: of the box.
        base: shared address of the box.
        rows: of .tile::scatter4.
        reduce: new elements of old ones and those of the box, as bytes of each.

    Returns:
        The memory; nothing outside the tensor has changed.
    """
    bits, sixteen = TYPES[tensor.data_type]
    linear = np.unpackbits(linear_of(shared, tensor.swizzle, base), bitorder="little")
    result = np.unpackbits(memory, bitorder="little")
    for number, at in elements_of(tensor, coordinates, rows):
        if at is None:
            continue
        start = number // 16 * sixteen * 8 + number % 16 * bits
        value = linear[start : start + bits]
        if reduce is not None:
            old = np.packbits(result[at : at + bits], bitorder="little")
            new = reduce(old, np.packbits(value, bitorder="little"))
            value = np.unpackbits(new.view(np.uint8), bitorder="little")
        result[at : at + bits] = value
    return np.packbits(result, bitorder="little")
