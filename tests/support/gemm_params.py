"""The structures of csrc/kernels/gemm_params.h, for ctypes."""

from __future__ import annotations

import ctypes


class Divisor(ctypes.Structure):
    """Of csrc/kernels/divisor.h: floor(x / value) is x * multiplier >> shift for x < 2**31."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("value", "multiplier", "shift"))

    @classmethod
    def of(cls, value: int) -> Divisor:
        shift = 31 + (value - 1).bit_length()
        return cls(value, -(-(1 << shift) // value), shift)


class Raster(ctypes.Structure):
    """GemmRaster of csrc/kernels/gemm_params.h."""

    _fields_ = (
        ("tiles_m", ctypes.c_uint32),
        *((n, Divisor) for n in ("matrix_tiles", "strip_tiles", "strip", "last_strip", "splits")),
    )

    @classmethod
    def of(cls, tiles_m: int, tiles_n: int, strip: int, splits: int) -> Raster:
        last = tiles_m % strip or min(strip, tiles_m)
        sizes = (tiles_m * tiles_n, strip * tiles_n, strip, last, splits)
        return cls(tiles_m, *map(Divisor.of, sizes))


class Params(ctypes.Structure):
    """GemmParams of csrc/kernels/gemm_params.h."""

    _fields_ = (
        *((name, ctypes.c_uint8 * 128) for name in ("a", "b", "scales_a", "scales_b", "d")),
        *((name, ctypes.c_uint64) for name in ("global_scale_a", "global_scale_b")),
        *((name, ctypes.c_uint64) for name in ("bias", "c", "out")),
        *((name, ctypes.c_uint64) for name in ("row_groups", "k_groups")),
        *((name, ctypes.c_uint32) for name in ("groups", "m", "n", "steps", "split_steps")),
        ("raster", Raster),
        *((name, ctypes.c_uint32) for name in ("batch_a", "batch_b")),
        *((name, ctypes.c_uint32) for name in ("batch_scale_a", "batch_scale_b", "batch_bias")),
        *((name, ctypes.c_uint8) for name in ("out_type", "c_type", "bias_type")),
        *((name, ctypes.c_uint8) for name in ("element_a", "element_b")),
        *((name, ctypes.c_uint8) for name in ("d_by_map", "c_by_vector", "transposed")),
        ("padding", ctypes.c_uint8 * 24),
    )


class ReduceParams(ctypes.Structure):
    """GemmReduceParams of the same file."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("parts", "global_scale_a", "global_scale_b")),
        *((name, ctypes.c_uint64) for name in ("bias", "c", "out")),
        ("elements", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("batch", "columns", "splits")),
        *((name, ctypes.c_uint32) for name in ("batch_scale_a", "batch_scale_b", "batch_bias")),
        *((name, ctypes.c_uint8) for name in ("out_type", "c_type", "bias_type")),
    )


class Bf16Params(ctypes.Structure):
    """GemmBf16Params of the same file."""

    _fields_ = (
        ("gemm", Params),
        *((name, ctypes.c_uint64) for name in ("values_a", "values_b", "scales_a", "scales_b")),
        *((name, ctypes.c_uint32) for name in ("pitch_a", "pitch_b", "scale_groups")),
        ("padding", ctypes.c_uint8 * 20),
    )
