"""The block formats as data: which elements, which scales, how rows are packed.

Every property of a format is derived here and nowhere else in Python; the C++ twin is
``csrc/numerics/formats.h``.
"""

from __future__ import annotations

import dataclasses

from jax_fp4 import _check

_ELEMENT_BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}
_ELEMENT_MAX = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0, "e4m3": 448.0, "e5m2": 57344.0}

HADAMARD_SIZE = 16
"""Elements of the contraction axis that the random Hadamard transform rotates together."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A block-scaled number format.

    ``value[k] = element(code[k]) * scale(scales[k // block]) * global_scale``

    Attributes:
        name: what users and error messages call it.
        element: ``"e2m1"``, ``"e2m3"``, ``"e3m2"``, ``"e4m3"`` or ``"e5m2"``.
        scale: ``"ue4m3"`` (a UE4M3 byte a block and one f32 a tensor), ``"ue8m0"`` (a power of two
            a block), or ``"unit"`` (one f32 a tensor only; every scale byte is 127, that is 1).
        block: elements of the contraction axis that share a scale byte.
    """

    name: str
    element: str
    scale: str
    block: int

    def __post_init__(self) -> None:
        """Only combinations that hardware and csrc/numerics/formats.h know."""
        _check.one_of("Format", "element", self.element, tuple(_ELEMENT_BITS))
        _check.one_of("Format", "scale", self.scale, ("ue4m3", "ue8m0", "unit"))
        expected = 16 if self.scale == "ue4m3" else 32
        if self.block != expected or (self.scale == "ue4m3" and self.element != "e2m1"):
            _check.fail(
                "Format",
                "block",
                "16 with e2m1 and ue4m3, or 32 with any element and ue8m0 or unit",
                f"{self.block} with {self.element} and {self.scale}",
                "use one of jax_fp4.FORMATS",
            )

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return _ELEMENT_BITS[self.element]

    @property
    def element_max(self) -> float:
        """The largest finite element."""
        return _ELEMENT_MAX[self.element]

    @property
    def tensor_scaled(self) -> bool:
        """Whether the tensor has an f32 scale taken from its amax (MX formats have none)."""
        return self.scale != "ue8m0"

    def row_bytes(self, k: int) -> int:
        """Bytes of a packed row of ``k`` codes.

        Rows are padded with zero codes to 16 bytes, 6-bit rows to 96 bytes: the pitch that a TMA
        tensor map needs.
        """
        if self.bits == 4:
            return -(-k // 32) * 16
        if self.bits == 6:
            return -(-k // 128) * 96
        return -(-k // 16) * 16

    @property
    def whole_elements(self) -> int:
        """Elements of the shortest part of a row whose packed bytes and scales stand alone."""
        return 128 if self.bits == 6 else 32

    def blocks(self, k: int) -> int:
        """Scale bytes of a row of ``k`` elements; the last block may be shorter."""
        return -(-k // self.block)

    def scale_shape(self, layout: str, rows: int, k: int) -> tuple[int, ...]:
        """Shape of the scales of ``rows`` rows of ``k`` elements.

        ``"linear"``: (rows, blocks). ``"tiled"``: (ceil(rows/128), ceil(blocks/4), 32, 4, 4), the
        layout that tensor cores read, padding bytes 0.
        """
        blocks = self.blocks(k)
        if layout == "linear":
            return (rows, blocks)
        return (-(-rows // 128), -(-blocks // 4), 32, 4, 4)

    def attribute(self) -> str:
        """The fields of a custom call's attribute (csrc/ffi/attributes.h)."""
        return f"element={self.element} scale={self.scale} block={self.block}"

    def __repr__(self) -> str:
        return self.name


NVFP4 = Format("NVFP4", "e2m1", "ue4m3", 16)
MXFP4 = Format("MXFP4", "e2m1", "ue8m0", 32)
MXFP6_E2M3 = Format("MXFP6_E2M3", "e2m3", "ue8m0", 32)
MXFP6_E3M2 = Format("MXFP6_E3M2", "e3m2", "ue8m0", 32)
MXFP8_E4M3 = Format("MXFP8_E4M3", "e4m3", "ue8m0", 32)
MXFP8_E5M2 = Format("MXFP8_E5M2", "e5m2", "ue8m0", 32)
FP8_E4M3 = Format("FP8_E4M3", "e4m3", "unit", 32)
FP8_E5M2 = Format("FP8_E5M2", "e5m2", "unit", 32)

FORMATS = (
    NVFP4,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    FP8_E4M3,
    FP8_E5M2,
)
"""Every format of this package."""
