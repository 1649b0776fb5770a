"""Names of the driver's tensor-map enumerations, for `sim.tensor_map`: no rule is checked here.

The rules of cuTensorMapEncodeTiled are those of csrc/sim/tensor_map.cc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# In the order of cuda.h, whose enumerations count from 0.
DATA_TYPES = (
    "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "bfloat16", "float32_ftz", "tfloat32", "tfloat32_ftz", "16u4_align8b", "16u4_align16b",
    "16u6_align16b",
)  # fmt: skip
INTERLEAVES = ("none", "16b", "32b")
SWIZZLES = (
    "none", "32b", "64b", "128b", "128b_atom_32b", "128b_atom_32b_flip_8b", "128b_atom_64b",
)  # fmt: skip
OOB_FILLS = ("zeros", "nan")


def native_arguments(
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    data_type: str,
    swizzle: str,
    interleave: str,
    element_strides: Sequence[int] | None,
    oob_fill: str,
) -> tuple[Any, ...]:
    """The arguments of `_sim.tensor_map`, in its order; L2 promotion is a hint and is left out."""
    return (
        address,
        _value("data_type", data_type, DATA_TYPES),
        list(dims),
        list(strides),
        list(box),
        [1] * len(dims) if element_strides is None else list(element_strides),
        _value("interleave", interleave, INTERLEAVES),
        _value("swizzle", swizzle, SWIZZLES),
        0,
        _value("oob_fill", oob_fill, OOB_FILLS),
    )


def _value(argument: str, name: str, names: tuple[str, ...]) -> int:
    if name not in names:
        raise ValueError(f"{argument}: expected one of {', '.join(names)}, got {name!r}")
    return names.index(name)
