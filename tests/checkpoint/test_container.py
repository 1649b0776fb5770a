"""The safetensors container: equal to the safetensors package's, byte for byte."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jax_fp4 import checkpoint
from support.checkpoints import bf16, file_bytes, header_of, write_raw

ARRAYS = {
    "b.f32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.f32": np.array(3.5, np.float32),
    "z.bf16": np.arange(5).astype(ml_dtypes.bfloat16),
    "scale": np.array([[1, 2]], np.uint8),
    "no.rows": np.zeros((0, 7), np.int64),
    "ids": np.array([-1, 2**40]),
    "mask": np.array([True, False, True]),
    "half": np.array([1.5, -2], np.float16),
    "gewicht.größe": np.array([1], np.int32),
    'quote"and\\slash': np.array([7], np.uint16),
}


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    """The same arrays give the same file: order of tensors, header, padding, data."""
    theirs = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(ARRAYS, theirs, metadata={"format": "np"})
    ours = tmp_path / "ours.safetensors"
    checkpoint.save(ours, ARRAYS, convention="modelopt", metadata={"format": "np"}, checksums=False)
    assert ours.read_bytes() == theirs.read_bytes()


def test_tensors_are_read_as_the_safetensors_package_reads_them(tmp_path: Path) -> None:
    """Names, shapes, dtypes and bytes."""
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    tree = checkpoint.load(path)
    assert set(tree) == set(ARRAYS)
    for name, array in ARRAYS.items():
        found = tree[name]
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


def test_our_files_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    """Also with our entries of the metadata."""
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, ARRAYS, convention="modelopt", metadata={"k": "ü"})
    for name, array in safetensors.numpy.load_file(path).items():
        assert array.tobytes() == ARRAYS[name].tobytes()


@pytest.mark.parametrize("gap", [" ", "\n\t"])
def test_a_foreign_layout_of_the_header_survives(tmp_path: Path, gap: str) -> None:
    """Order, blanks and offsets of any valid header are written again as they were."""
    raw = {"m.a": ("F32", (2,), b"12345678"), "m.b": ("U8", (3,), b"abc")}
    header = header_of(raw, {"x": "1"})
    header["m.b"]["data_offsets"], header["m.a"]["data_offsets"] = [0, 3], [3, 11]
    text = str(header).replace("'", '"').replace(", ", f",{gap}").encode() + b"  "
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes(text, b"abc12345678"))
    with checkpoint.Checkpoint(path) as opened:
        assert list(opened) == ["m.a", "m.b"]
        checkpoint.save(tmp_path / "again.safetensors", opened)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """Opening reads the header only: a file that shrinks afterwards is noticed at the tensor."""
    path = write_raw(
        tmp_path / "m.safetensors",
        {"a": ("BF16", (4,), bf16(np.ones(4, np.float32))), "b": ("U8", (8,), b"12345678")},
    )
    with checkpoint.Checkpoint(path) as opened:
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 3)
        assert np.asarray(opened["a"]).astype(np.float32).tolist() == [1, 1, 1, 1]
        with pytest.raises(checkpoint.CheckpointError, match=r"m.safetensors: b.*8 bytes.*5 bytes"):
            opened["b"]


def test_a_changed_byte_of_our_files_is_noticed(tmp_path: Path) -> None:
    """Every byte of the data: the checksum names the tensor."""
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, {"a": ARRAYS["b.f32"], "b": ARRAYS["ids"]}, convention="modelopt")
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    for position in range(start, len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 4]) + good[position + 1 :])
        name = "b" if position < start + 16 else "a"
        with pytest.raises(checkpoint.CheckpointError, match=rf"{name}` must be data with CRC-32"):
            checkpoint.load(path)
