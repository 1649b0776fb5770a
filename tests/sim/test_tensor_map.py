"""Tensor maps: every rule of cuTensorMapEncodeTiled, and the bytes of a box.

Rules and sizes are those of cuda.h (CUDA 12.9), written down here a second time.
"""

import ctypes
import functools
from typing import Any

import numpy as np
import pytest

from jax_fp4 import sim
from support.native import shared_library
from support.repository import ROOT

# name -> (bits in global memory, bytes of 16 elements in shared memory)
ELEMENTS = {
    "uint8": (8, 16), "uint16": (16, 32), "uint32": (32, 64), "int32": (32, 64),
    "uint64": (64, 128), "int64": (64, 128), "float16": (16, 32), "float32": (32, 64),
    "float64": (64, 128), "bfloat16": (16, 32), "float32_ftz": (32, 64), "tfloat32": (32, 64),
    "tfloat32_ftz": (32, 64), "16u4_align8b": (4, 8), "16u4_align16b": (4, 16),
    "16u6_align16b": (6, 16),
}  # fmt: skip
SPANS = {
    "none": 0, "32b": 32, "64b": 64, "128b": 128, "128b_atom_32b": 128,
    "128b_atom_32b_flip_8b": 128, "128b_atom_64b": 128,
}  # fmt: skip
ADDRESS = 1 << 36

VALID: dict[str, Any] = dict(
    address=ADDRESS, dims=[64, 48, 3], strides=[128, 6144], box=[32, 8, 2], data_type="bfloat16",
    swizzle="64b",
)  # fmt: skip
PADDED4 = dict(
    dims=[256, 48], strides=[128], box=[128, 8], data_type="16u4_align16b", swizzle="128b"
)
PADDED6 = PADDED4 | dict(strides=[192], data_type="16u6_align16b")
PACKED = PADDED4 | dict(data_type="16u4_align8b", swizzle="64b")
INTERLEAVED = dict(interleave="32b", swizzle="32b")


def make(**changes: Any) -> bytes:
    """A map that is right but for the changes."""
    return sim.tensor_map(**(VALID | changes))


@functools.cache
def native() -> ctypes.CDLL:
    folder = ROOT / "tests" / "sim"
    return shared_library(
        "tensor_map",
        [folder / "tensor_map_c.cc", ROOT / "csrc" / "sim" / "tensor_map.cc"],
        "-O1", "-Wall", "-Wextra", "-Werror",
    )  # fmt: skip


def fields(data: bytes) -> list[int] | None:
    out = np.zeros(27, np.uint64)
    known = native().tensor_map_fields(data, ctypes.c_void_p(out.ctypes.data))
    return out.tolist() if known else None


def sizes(data: bytes) -> list[int]:
    out = np.zeros(7, np.uint64)
    native().tensor_map_sizes(data, ctypes.c_void_p(out.ctypes.data))
    return out.tolist()


def test_a_map_keeps_every_field() -> None:
    """Decoding gives what was encoded, at the largest values; what is beyond the rank is zero."""
    data = sim.tensor_map(
        address=(1 << 64) - 16,
        dims=[1 << 32, 2, 3, 4, 5],
        strides=[(1 << 40) - 16, 16, 32, 48],
        box=[256, 255, 1, 2, 3],
        element_strides=[1, 8, 2, 3, 4],
        data_type="float16",
        interleave="16b",
        swizzle="128b_atom_64b",
        oob_fill="nan",
    )
    assert len(data) == 128
    assert fields(data) == [
        6, 5, (1 << 64) - 16, 1 << 32, 2, 3, 4, 5, 2, (1 << 40) - 16, 16, 32, 48,
        256, 255, 1, 2, 3, 1, 8, 2, 3, 4, 1, 6, 0, 1,
    ]  # fmt: skip
    assert fields(make(dims=[64], strides=[], box=[32])) == [
        9, 1, ADDRESS, 64, 0, 0, 0, 0, 2, 0, 0, 0, 0, 32, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0,
    ]  # fmt: skip


def test_bytes_that_changed_are_no_map() -> None:
    """One flipped bit anywhere, or zeros, and the bytes are refused."""
    data = make()
    assert fields(data) is not None
    for position in range(128):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[position] ^= bit
            assert fields(bytes(changed)) is None, position
    assert fields(bytes(128)) is None


@pytest.mark.parametrize("name", ELEMENTS)
def test_bytes_of_a_box(name: str) -> None:
    """Copied bytes are packed, rows in shared memory have the gaps of the 16B types."""
    bits, sixteen = ELEMENTS[name]
    box = [128 if bits < 8 else 16 if bits > 8 else 48, 5, 7]
    dims = [256, 64, 64]
    data = make(
        data_type=name, dims=dims, strides=[2048, 1 << 20], box=box, swizzle="none",
        element_strides=[1, 2, 3],
    )  # fmt: skip
    row, shared, rows = box[0] * bits // 8, box[0] // 16 * sixteen, 3 * 3
    padded = sixteen * 8 != 16 * bits
    assert sizes(data) == [bits, padded, 0, row, shared, row * rows, shared * rows]
    fields_of = fields(data)
    assert fields_of is not None
    assert fields_of[8] == (0 if bits % 8 else bits // 8)


@pytest.mark.parametrize("name", SPANS)
def test_box_fills_at_most_the_swizzle_span(name: str) -> None:
    """A row as long as the span is right, 16 bytes more are not."""
    span = SPANS[name]
    assert sizes(make(data_type="uint8", swizzle=name, box=[span or 256, 1, 1]))[2] == span
    if span:
        with pytest.raises(ValueError, match=rf"boxDim\[0\].*at most {span} bytes"):
            make(data_type="uint8", swizzle=name, box=[span + 16, 1, 1])


@pytest.mark.parametrize(
    "changes",
    [
        dict(dims=[64, 48, 1], strides=[128, 0]),  # CUTLASS: stride 0 where the batch is 1
        dict(strides=[6144, 128]),  # dimensions need not be in order of stride
        dict(dims=[1 << 32, 1, 1]),
        dict(address=0),
        dict(box=[32, 256, 256], element_strides=[8, 8, 8]),
        PADDED4,
        PADDED4 | dict(swizzle="none"),
        PADDED4 | dict(swizzle="128b_atom_32b"),
        PADDED6,
        PADDED6 | dict(swizzle="128b_atom_64b"),
        PACKED | dict(dims=[66, 48], strides=[48], box=[32, 1]),
        PACKED | dict(box=[256, 1], swizzle="128b"),
        INTERLEAVED,
        INTERLEAVED | dict(box=[3, 8, 2]),  # the inner dimension is free of the multiple of 16
        dict(interleave="16b", swizzle="128b_atom_64b", box=[256, 8, 2]),
        dict(oob_fill="nan"),
        dict(oob_fill="nan", data_type="tfloat32_ftz", box=[16, 1, 1]),
    ],
)
def test_right_arguments_are_accepted(changes: dict[str, Any]) -> None:
    """The edges of the rules lie where cuda.h puts them."""
    assert fields(make(**changes)) is not None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (dict(data_type="float4"), "data_type: expected one of uint8, .*got 'float4'"),
        (dict(interleave="64b"), "interleave: expected one of"),
        (dict(swizzle="96b"), "swizzle: expected one of"),
        (dict(oob_fill="one"), "oob_fill: expected one of"),
        (dict(dims=[1] * 6, strides=[16] * 5, box=[32] * 6), "tensorRank: expected 1 to 5, got 6"),
        (dict(dims=[], strides=[], box=[]), "strides one for each but the first"),
        (dict(box=[32, 8]), "box and element_strides need a number for each of the 3"),
        (dict(element_strides=[1, 1]), "box and element_strides need a number for each of the 3"),
        (dict(strides=[128]), "strides one for each but the first"),
        (
            dict(interleave="16b", dims=[64, 2], strides=[128], box=[32, 1]),
            "tensorRank: expected 3 to 5 for an interleaved layout, got 2",
        ),
        (dict(address=ADDRESS + 8), "globalAddress: expected a multiple of 16, got 0x1000000008"),
        (PADDED4 | dict(address=ADDRESS + 16), "globalAddress: .*32 for 16U4_ALIGN16B"),
        (PADDED6 | dict(address=ADDRESS + 16), "globalAddress: .*32 for 16U6_ALIGN16B"),
        (INTERLEAVED | dict(address=ADDRESS + 16), "globalAddress: .*32 for interleave 32B"),
        (dict(dims=[64, 0, 3]), r"globalDim\[1\]: expected 1 to 2\^32, got 0"),
        (dict(dims=[64, 48, (1 << 32) + 1]), r"globalDim\[2\]: .*2\^32, got 4294967297"),
        (PADDED4 | dict(dims=[192, 48]), r"globalDim\[0\]: expected a multiple of 128 .*got 192"),
        (PADDED6 | dict(dims=[192, 48]), r"globalDim\[0\]: expected a multiple of 128 .*got 192"),
        (PACKED | dict(dims=[129, 48]), r"globalDim\[0\]: expected a multiple of 2 .*got 129"),
        (dict(strides=[128, 6152]), r"globalStrides\[1\]: expected a multiple of 16, got 6152"),
        (dict(strides=[1 << 40, 16]), r"globalStrides\[0\]: expected less than 2\^40"),
        (dict(strides=[0, 16]), r"globalStrides\[0\]: expected more than 0, since globalDim\[1\]"),
        (PADDED4 | dict(strides=[144]), r"globalStrides\[0\]: .*32 for 16U4_ALIGN16B, got 144"),
        (PADDED6 | dict(strides=[208]), r"globalStrides\[0\]: .*32 for 16U6_ALIGN16B, got 208"),
        (INTERLEAVED | dict(strides=[144, 6144]), r"globalStrides\[0\]: .*32 for interleave 32B"),
        (dict(box=[32, 0, 2]), r"boxDim\[1\]: expected 1 to 256, got 0"),
        (dict(box=[32, 8, 257]), r"boxDim\[2\]: expected 1 to 256, got 257"),
        (PADDED4 | dict(box=[64, 8]), r"boxDim\[0\]: expected 128 for 16U4_ALIGN16B, got 64"),
        (PADDED6 | dict(box=[64, 8]), r"boxDim\[0\]: expected 128 for 16U6_ALIGN16B, got 64"),
        (dict(box=[12, 8, 2]), r"boxDim\[0\]: expected a multiple of 8 \(16 bytes of BFLOAT16\)"),
        (PACKED | dict(box=[48, 8]), r"boxDim\[0\]: expected a multiple of 32 \(16 bytes of 16U4"),
        (dict(element_strides=[1, 0, 1]), r"elementStrides\[1\]: expected 1 to 8, got 0"),
        (dict(element_strides=[1, 1, 9]), r"elementStrides\[2\]: expected 1 to 8, got 9"),
        (dict(box=[40, 8, 2]), r"boxDim\[0\]: expected at most 64 bytes .*40 elements of 80 bytes"),
        (dict(interleave="32b"), "swizzle: expected 32B for interleave 32B, got 64B"),
        (
            PADDED6
            | INTERLEAVED
            | dict(dims=[256, 48, 1], strides=[192, 192], box=[128, 1, 1]),
            "interleave: expected NONE for 16U6_ALIGN16B",
        ),
        (PADDED6 | dict(swizzle="128b_atom_32b_flip_8b"), "swizzle: expected NONE, 128B, .*_64B"),
        (PADDED4 | dict(swizzle="128b_atom_64b"), "swizzle: expected NONE, 128B or 128B_ATOM_32B"),
        (dict(oob_fill="nan", data_type="uint16"), "oobFill: .*UINT16 is no floating-point type"),
        (PACKED | dict(oob_fill="nan"), "oobFill: .*16U4_ALIGN8B is no floating-point type"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(changes: dict[str, Any], complaint: str) -> None:
    """One planted error for each rule: the text names argument, expectation and value."""
    with pytest.raises(ValueError, match=complaint):
        make(**changes)
