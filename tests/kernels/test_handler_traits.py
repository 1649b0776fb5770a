"""What the GPU handlers tell XLA about themselves, asked as XLA asks, without a driver.

XLA puts a custom call into a CUDA graph only if its execute handler has the command-buffer trait,
and loads kernels in the initialize stage, which no graph contains. Other projects have lost both,
and nothing failed but speed.
"""

import ctypes

import pytest

from jax_fp4 import _core

_CALL_FRAME_BYTES = 168  # XLA_FFI_CallFrame_STRUCT_SIZE of FFI 0.3: up to its attributes
_COMMAND_BUFFER_COMPATIBLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE of c_api.h
_METADATA_EXTENSION = 1  # XLA_FFI_Extension_Metadata


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, with its XLA_FFI_Api_Version inside."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),
    ]


class _Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    ]


class _CallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame of FFI 0.3: api, context, stage, arguments, results, attributes, future.

    Only size and extension are read when metadata is asked for.
    """

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("rest", ctypes.c_char * (3 * 8 + 40 + 40 + 48 + 8)),
    ]


def metadata(capsule: object) -> _Metadata:
    """What a handler answers to the question for its metadata."""
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer_of(capsule, None)
    assert address is not None
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))(address)
    answer = _Metadata(struct_size=ctypes.sizeof(_Metadata))
    extension = _Extension(
        ctypes.sizeof(_Extension), _METADATA_EXTENSION, None, ctypes.pointer(answer)
    )
    frame = _CallFrame(_CALL_FRAME_BYTES, ctypes.pointer(extension))
    assert handler(ctypes.byref(frame)) is None, "the handler returned an error"
    return answer


@pytest.mark.parametrize("target", sorted(_core.cuda_handlers()))
def test_handlers_may_enter_graphs_and_load_before(target: str) -> None:
    """The trait on the execute stage, an initialize stage, and the FFI version of the build."""
    stages = _core.cuda_handlers()[target]
    assert sorted(stages) == ["execute", "initialize"]
    assert metadata(stages["execute"]).traits == _COMMAND_BUFFER_COMPATIBLE
    for capsule in stages.values():
        answer = metadata(capsule)
        assert (answer.major, answer.minor) == tuple(_core.FFI_API_VERSION)


def test_a_handler_without_the_trait_is_told_apart() -> None:
    """The CPU's handlers do not have it: the question is answered, not assumed."""
    for stages in _core.cpu_handlers().values():
        assert metadata(stages["execute"]).traits == 0
