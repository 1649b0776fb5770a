"""How quantized tensors are named and stored by the programs whose checkpoints these are.

For a tensor X [..., N, K] (for example ``model.layers.0.mlp.up_proj.weight``), in blocks of B:

| convention | codes | block scales | tensor scale |
|---|---|---|---|
| modelopt, NVFP4 | X U8 [..., N, K/2] | X_scale F8_E4M3 [..., N, K/16] | X_scale_2 F32, a factor |
| modelopt, MXFP4 | X U8 [..., N, K/2] | X_scale U8 [..., N, K/32] | - |
| compressed-tensors, NVFP4 | X_packed, as above | as above | X_global_scale F32, a divisor |
| compressed-tensors, MXFP4 | X_packed, as above | as above | - |
| compressed-tensors, MXFP6 E2M3 | X_packed U8 [..., N, 3K/4] | as above | - |
| both, MXFP8 | X F8_E4M3 [..., N, K] | X_scale U8 [..., N, K/32] | - |
| gpt-oss, MXFP4 | X_blocks U8 [..., N, K/32, 16] | X_scales U8 [..., N, K/32] | - |
| ours, other MXFP6, MXFP8_E5M2 | X F6_E2M3, F6_E3M2, F8_E5M2 [..., N, K] | as above | - |

In a tree, codes and block scales are one BlockScaledArray called X. Everything else, also the
tensor scale, is a plain array under its own name and with its own bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jax_fp4.block_array import BlockScaledArray
from jax_fp4.checkpoint.header import Entry
from jax_fp4.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, NVFP4, Format

CONVENTIONS = ("modelopt", "compressed-tensors", "gpt-oss")
"""Names of the conventions, for `save`."""

_OWN_DTYPE = {
    "F6_E2M3": MXFP6_E2M3,
    "F6_E3M2": MXFP6_E3M2,
    "F8_E4M3": MXFP8_E4M3,
    "F8_E5M2": MXFP8_E5M2,
}
_DTYPE_OF = {format: dtype for dtype, format in _OWN_DTYPE.items()}
_GLOBAL_SUFFIX = {"modelopt": "_scale_2", "compressed-tensors": "_global_scale"}

# A scale byte for blocks of zeros, which decode to zero with any scale: the one that the program
# itself stores, since it divides by the scale when it quantizes again. ModelOpt: 1;
# compressed-tensors: 1/8, the spacing of E4M3 at 1.
ZERO_BLOCK_SCALE = {"modelopt": 0x38, "compressed-tensors": 0x20, "gpt-oss": 0}


class ConventionError(ValueError):
    """(tensor, expected, got): entries that do not fit together."""

    def __init__(self, tensor: str, expected: str, got: str) -> None:
        super().__init__(tensor, expected, got)
        self.tensor, self.expected, self.got = tensor, expected, got


@dataclasses.dataclass(frozen=True)
class Stored:
    """A quantized tensor of a file.

    Attributes:
        name: in the tree.
        convention: one of `CONVENTIONS`.
        format: the block format.
        codes: stored name of the codes.
        scales: stored name of the block scales.
        global_scale: stored name of the tensor scale, which is also its name in the tree; None for
            MX formats.
        lead: leading dimensions.
        rows: N.
        length: K.
    """

    name: str
    convention: str
    format: Format
    codes: str
    scales: str
    global_scale: str | None
    lead: tuple[int, ...]
    rows: int
    length: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row of codes."""
        return self.length * self.format.bits // 8

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of the stored codes and scales."""
        shape = (*self.lead, self.rows)
        blocks = self.length // self.format.block
        code_dtype, columns = "U8", (self.row_bytes,)
        if self.codes == self.name and self.format.bits > 4:
            code_dtype, columns = _DTYPE_OF[self.format], (self.length,)
        if self.convention == "gpt-oss":
            columns = (blocks, 16)
        scale_dtype = "F8_E4M3" if self.format.scale == "ue4m3" else "U8"
        return {
            self.codes: (code_dtype, (*shape, *columns)),
            self.scales: (scale_dtype, (*shape, blocks)),
        }

    def global_of(self, stored: np.ndarray) -> np.ndarray:
        """float32 [*lead]: the factor, from the stored tensor scale."""
        value = stored if self.convention == "modelopt" else np.float32(1) / stored
        return np.broadcast_to(
            value.reshape(-1 if stored.size > 1 else ()), self._flat_lead()
        ).reshape(self.lead)

    def stored_global(self, factor: np.ndarray) -> np.ndarray:
        """The tensor scale as the program stores it, from the factor float32 [*lead]."""
        with np.errstate(divide="ignore"):
            value = factor if self.convention == "modelopt" else np.float32(1) / factor
        if self.lead:
            return np.ascontiguousarray(value, np.float32)
        return np.asarray(value, np.float32).reshape(() if self.convention == "modelopt" else (1,))

    def _flat_lead(self) -> tuple[int, ...]:
        return (int(np.prod(self.lead)),) if self.lead else ()


def planned(
    name: str, format: Format, convention: str, lead: Sequence[int], rows: int, length: int
) -> Stored:
    """A quantized tensor of a file that is to be written.

    Raises:
        ConventionError: the convention has no such format, or no such length.
    """
    if length % format.block or (format is not NVFP4 and format.scale != "ue8m0"):
        expected = f"a multiple of {format.block} elements long along the quantized axis"
        if format.scale == "unit":
            raise ConventionError(name, "in a format with block scales", format.name)
        raise ConventionError(name, expected, f"{length}")
    if convention == "gpt-oss" and format is not MXFP4:
        raise ConventionError(name, "MXFP4, the only format of gpt-oss", format.name)
    codes, scales, tensor_scale = name, f"{name}_scale", None
    if format.bits == 4 or (convention == "compressed-tensors" and format is MXFP6_E2M3):
        codes = {"modelopt": name, "compressed-tensors": f"{name}_packed"}.get(
            convention, f"{name}_blocks"
        )
        scales = f"{name}_scales" if convention == "gpt-oss" else scales
    if format.tensor_scaled:
        tensor_scale = name + _GLOBAL_SUFFIX[convention]
    return Stored(name, convention, format, codes, scales, tensor_scale, tuple(lead), rows, length)


# ---- Reading -------------------------------------------------------------------------------------


def find_quantized(entries: Mapping[str, Entry]) -> dict[str, Stored]:
    """The quantized tensors among the entries, by the name of their codes.

    Raises:
        ConventionError: parts of a quantized tensor are missing or do not fit together, or it is
            quantized in a way that is not known here.
    """
    found: dict[str, Stored] = {}
    for name, entry in entries.items():
        stored = _recognized(name, entry, entries)
        if stored is not None:
            _check_parts(stored, entries)
            found[name] = stored
    used = {part for stored in found.values() for part in (stored.scales, stored.global_scale)}
    for name in entries:
        for suffix in ("weight_scale_2", "weight_global_scale"):
            if name.endswith(suffix) and name not in used:
                codes = name[: -len(suffix)] + "weight"
                if suffix == "weight_global_scale":
                    codes += "_packed"
                raise ConventionError(codes, f"stored beside {name}", "no such codes and scales")
    return found


def _recognized(name: str, entry: Entry, entries: Mapping[str, Entry]) -> Stored | None:
    scale = entries.get(f"{name}_scale")
    if name.endswith("_packed"):
        base = name.removesuffix("_packed")
        if entry.dtype != "U8":
            raise ConventionError(name, "floats packed as U8", entry.dtype)
        if base in entries:
            raise ConventionError(name, f"alone, without {base}", "both")
        scale = _required(f"{base}_scale", name, entries)
        if scale.dtype == "U8" and entry.nbytes == 24 * scale.nbytes and entry.nbytes:
            return _six_bit(base, entry, scale)
        return _four_bit(base, "compressed-tensors", entry, scale, (2,))
    if name.endswith("_blocks") and entry.dtype == "U8" and entry.shape[-1:] == (16,):
        base = name.removesuffix("_blocks")
        scale = _required(f"{base}_scales", name, entries)
        return _four_bit(base, "gpt-oss", entry, scale, (16, 2))
    if entry.dtype in _OWN_DTYPE and scale is not None and scale.dtype == "U8":
        if len(entry.shape) < 2:
            raise ConventionError(name, "of rank 2 or more", f"shape {list(entry.shape)}")
        *lead, rows, length = entry.shape
        return Stored(
            name, "modelopt", _OWN_DTYPE[entry.dtype], name, f"{name}_scale", None,
            tuple(lead), rows, length,
        )  # fmt: skip
    if entry.dtype == "U8" and scale is not None:
        return _four_bit(name, "modelopt", entry, scale, (2,))
    if entry.dtype == "U8" and name.endswith("weight"):
        raise ConventionError(
            f"{name}_scale", f"stored beside the U8 codes {name}", "no such tensor"
        )
    if entry.dtype in ("F4", "F6_E2M3", "F6_E3M2"):
        raise ConventionError(name, f"FP6 with U8 scales in {name}_scale", entry.dtype)
    return None


def _required(name: str, codes: str, entries: Mapping[str, Entry]) -> Entry:
    if name not in entries:
        raise ConventionError(name, f"stored beside {codes}", "no such tensor")
    return entries[name]


def _four_bit(
    base: str, convention: str, entry: Entry, scale: Entry, packing: tuple[int, ...]
) -> Stored:
    """Codes of four bits whose last ``len(packing)`` axes hold K, two codes in a byte."""
    rank = 1 + len(packing)
    if len(entry.shape) < rank:
        raise ConventionError(entry.name, f"of rank {rank} or more", f"shape {list(entry.shape)}")
    *lead, rows = entry.shape[: -len(packing)]
    length = 2 * int(np.prod(entry.shape[-len(packing) :], dtype=object))
    tensor_scale = None
    if scale.dtype == "F8_E4M3" and convention != "gpt-oss":
        format, tensor_scale = NVFP4, base + _GLOBAL_SUFFIX[convention]
    elif scale.dtype == "U8":
        format = MXFP4
    else:
        expected = "U8" if convention == "gpt-oss" else "F8_E4M3 (NVFP4) or U8 (MXFP4)"
        raise ConventionError(scale.name, f"of dtype {expected}", scale.dtype)
    return Stored(
        base, convention, format, entry.name, scale.name, tensor_scale, tuple(lead), rows, length
    )


def _six_bit(base: str, entry: Entry, scale: Entry) -> Stored:
    """E2M3 codes, four of them in three bytes: 24 bytes for each scale, where E2M1 has 16."""
    if len(entry.shape) < 2:
        raise ConventionError(entry.name, "of rank 2 or more", f"shape {list(entry.shape)}")
    *lead, rows, width = entry.shape
    length = width * 4 // 3
    return Stored(
        base, "compressed-tensors", MXFP6_E2M3, entry.name, scale.name, None,
        tuple(lead), rows, length,
    )  # fmt: skip


def _check_parts(stored: Stored, entries: Mapping[str, Entry]) -> None:
    block = stored.format.block
    if stored.length % block:
        expected = f"a multiple of {block} elements long in {stored.format}"
        raise ConventionError(stored.codes, expected, f"{stored.length}")
    for name, (_, shape) in stored.tensors().items():
        if entries[name].shape != shape:
            expected = f"of shape {list(shape)} beside {stored.codes}"
            if name == stored.codes:
                expected = f"of shape {list(shape)}"
            raise ConventionError(name, expected, f"{list(entries[name].shape)}")
    if stored.global_scale is not None:
        entry = entries.get(stored.global_scale)
        if entry is None:
            raise ConventionError(stored.global_scale, f"stored beside {stored.codes}", "nothing")
        if entry.dtype != "F32" or entry.nbytes not in (4, 4 * int(np.prod(stored.lead))):
            expected = f"one F32, or one for each leading index {list(stored.lead)}"
            raise ConventionError(entry.name, expected, f"{entry.dtype}{list(entry.shape)}")


def check_values(stored: Stored, scales: np.ndarray, tensor_scale: np.ndarray | None) -> None:
    """Scales that no such program writes are refused: they would decode to something else here.

    Args:
        stored: the tensor.
        scales: uint8, the bytes of its block scales, or of some of its rows.
        tensor_scale: float32, as stored.

    Raises:
        ConventionError: a block scale is negative, or a tensor scale is not positive and finite.
    """
    if stored.format.scale == "ue4m3" and scales.size and scales.max() > 0x7F:
        raise ConventionError(stored.scales, "without negative scales", f"byte {scales.max():#x}")
    if tensor_scale is None:
        return
    # A factor of 0 belongs to a tensor of zeros.
    good = np.isfinite(tensor_scale) & (tensor_scale >= 0)
    if stored.convention == "compressed-tensors":
        good &= tensor_scale > 0
    if not good.all():
        bad = tensor_scale.reshape(-1)[~good.reshape(-1)][0]
        raise ConventionError(str(stored.global_scale), "positive and finite", str(bad))


def fill_zero_scales(q: BlockScaledArray, convention: str) -> BlockScaledArray:
    """``q`` with the convention's scale for blocks of zeros, where its own is 0.

    The values stay what they are. compressed-tensors and ModelOpt divide by the scales when they
    quantize again, so that a 0 would make NaN; so does a tensor scale of 0, which becomes 1.

    Args:
        q: a quantized array with linear scales.
        convention: one of `CONVENTIONS`.

    Returns:
        The array, with NumPy parts.
    """
    values, scales = np.asarray(q.values), np.asarray(q.scales).copy()
    factor = np.asarray(q.global_scale)
    if q.format is NVFP4 and (scales == 0).any():
        packed = values[..., : q.length // 2]
        magnitudes = (packed & 0x77).reshape(*scales.shape, q.format.block // 2)
        scales[(scales == 0) & ~magnitudes.any(axis=-1)] = ZERO_BLOCK_SCALE[convention]
    if q.format.tensor_scaled:
        factor = np.where(factor == 0, np.float32(1), factor)
    return dataclasses.replace(q, values=values, scales=scales, global_scale=factor)
