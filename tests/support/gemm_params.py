"""The structures of csrc/kernels/gemm_params.h, for ctypes."""

import ctypes


class Params(ctypes.Structure):
    """GemmParams of csrc/kernels/gemm_params.h."""

    _fields_ = (
        *((name, ctypes.c_uint8 * 128) for name in ("a", "b", "scales_a", "scales_b", "d")),
        *((name, ctypes.c_uint64) for name in ("global_scale_a", "global_scale_b")),
        *((name, ctypes.c_uint64) for name in ("bias", "c", "out")),
        *((name, ctypes.c_uint64) for name in ("row_groups", "k_groups")),
        *((name, ctypes.c_uint32) for name in ("m", "n", "steps", "splits", "split_steps")),
        *((name, ctypes.c_uint32) for name in ("tiles_m", "tiles_n", "strip")),
        *((name, ctypes.c_uint32) for name in ("batch_a", "batch_b")),
        *((name, ctypes.c_uint32) for name in ("batch_scale_a", "batch_scale_b", "batch_bias")),
        *((name, ctypes.c_uint8) for name in ("out_type", "c_type", "bias_type")),
        *((name, ctypes.c_uint8) for name in ("element_a", "element_b")),
        *((name, ctypes.c_uint8) for name in ("d_by_map", "c_by_vector", "transposed")),
        ("padding", ctypes.c_uint8 * 12),
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
