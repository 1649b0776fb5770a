"""Quantized tensors of every convention: read as the oracle made them, written byte for byte."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import checkpoint
from jax_fp4.checkpoint import Checkpoint, CheckpointError
from oracles import quantizer
from support.checkpoints import bf16, stored_parts, write_raw

CASES = [
    ("modelopt", "NVFP4"),
    ("modelopt", "MXFP4"),
    ("modelopt", "MXFP8_E4M3"),
    ("compressed-tensors", "NVFP4"),
    ("compressed-tensors", "MXFP4"),
    ("compressed-tensors", "MXFP8_E4M3"),
    ("compressed-tensors", "MXFP8_E5M2"),
    ("compressed-tensors", "MXFP6_E2M3"),
    ("modelopt", "MXFP6_E2M3"),
    ("modelopt", "MXFP6_E3M2"),
    ("gpt-oss", "MXFP4"),
]
NAME = "model.layers.0.mlp.up_proj.weight"


def matrix(rows: int, k: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    x[0, :16] = 0
    return x


def with_neighbours(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a quantized tensor among plain ones, in the safetensors package's order."""
    tensors = {
        **parts,
        "model.norm.weight": ("BF16", (8,), bf16(np.arange(8, dtype=np.float32))),
        "model.layers.0.mlp.up_proj.bias": ("F32", (2,), b"12345678"),
    }
    order = ["F32", "BF16", "F8_E4M3", "F8_E5M2", "U8", "F6_E3M2", "F6_E2M3"]
    names = sorted(tensors, key=lambda name: (order.index(tensors[name][0]), name))
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("k", [32, 96])
@pytest.mark.parametrize(("convention", "format"), CASES)
def test_values_are_those_of_the_oracle(
    tmp_path: Path, convention: str, format: str, k: int
) -> None:
    """Codes, scales and tensor scale decode to the oracle's values: rounded once, to f32."""
    x = matrix(5, k)
    parts, values = stored_parts(convention, NAME, format, x)
    path = write_raw(tmp_path / "m.safetensors", with_neighbours(parts))
    q = checkpoint.load(path)[NAME]
    assert isinstance(q, fp4.BlockScaledArray)
    assert (q.format.name, q.shape, q.axis) == (format, (5, k), -1)
    found = np.asarray(fp4.dequantize(q, jnp.float32))
    assert found.tobytes() == values.astype(np.float32).tobytes()


@pytest.mark.parametrize("k", [32, 96])
@pytest.mark.parametrize(("convention", "format"), CASES)
def test_a_checkpoint_is_written_as_it_was_read(
    tmp_path: Path, convention: str, format: str, k: int
) -> None:
    """As a Checkpoint, as a tree with `like`, and as a tree with the convention: the same bytes."""
    parts, _ = stored_parts(convention, NAME, format, matrix(5, k))
    path = write_raw(tmp_path / "m.safetensors", with_neighbours(parts))
    again = tmp_path / "again.safetensors"
    with Checkpoint(path) as opened:
        checkpoint.save(again, opened)
        assert again.read_bytes() == path.read_bytes()
        tree = jax.tree.map(jnp.asarray, checkpoint.load(path))
        checkpoint.save(again, tree, like=opened)
        assert again.read_bytes() == path.read_bytes()
    checkpoint.save(again, tree, convention=convention, checksums=False)
    # Our header is padded to 8 bytes; what json.dumps wrote above has blanks.
    assert data_of(again) == data_of(path)
    with Checkpoint(again) as opened:
        order = list(opened.entries)
    assert order == list(with_neighbours(parts))


def data_of(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


@pytest.mark.parametrize(("convention", "format"), CASES)
def test_quantized_arrays_are_stored_as_the_table_says(
    tmp_path: Path, convention: str, format: str
) -> None:
    """What `quantize` returns, with tiled or linear scales, gives the oracle's stored bytes."""
    x = matrix(5, 96)
    q = fp4.quantize(jnp.asarray(x), {f.name: f for f in fp4.FORMATS}[format])
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, {NAME: q}, convention=convention)
    expected, _ = stored_parts(convention, NAME, format, x)
    with Checkpoint(path) as opened:
        assert {n: (e.dtype, e.shape) for n, e in opened.entries.items()} == {
            name: (dtype, shape) for name, (dtype, shape, _) in expected.items()
        }
        for name, (_, _, data) in expected.items():
            assert opened.stored(name).tobytes() == data, name
        found = opened[NAME]
    assert isinstance(found, fp4.BlockScaledArray)
    assert found.dtype == np.float32


def test_leading_dimensions_have_a_tensor_scale_each(tmp_path: Path) -> None:
    """Experts in one tensor [E, N, K]: scales of both conventions, and one for all of them."""
    x = jnp.asarray(np.stack([matrix(4, 64, seed=i) * 4.0**i for i in range(3)]))
    q = fp4.quantize(x)
    for convention in ("modelopt", "compressed-tensors"):
        path = tmp_path / f"{convention}.safetensors"
        checkpoint.save(path, {"e.weight": q}, convention=convention)
        tree = checkpoint.load(path)
        assert tree["e.weight"].shape == (3, 4, 64)
        if convention == "modelopt":
            same = fp4.dequantize(tree["e.weight"], jnp.float32)
            assert (same == fp4.dequantize(q)).all()
    shared = fp4.quantize(x, amax=7.0)
    one = np.float32(1) / np.asarray(shared.global_scale)[:1]
    factor = np.full(3, np.float32(1) / one[0])
    tree = {
        "e.weight": dataclasses.replace(shared, global_scale=factor),
        "e.weight_global_scale": one,
    }
    checkpoint.save(path, tree, convention="compressed-tensors")
    again = checkpoint.load(path)
    assert again["e.weight_global_scale"].shape == (1,)
    assert (again["e.weight"].global_scale == factor).all()


def test_kernels_keep_their_axis_and_dtype(tmp_path: Path) -> None:
    """A matrix [K, N] quantized along its first axis comes back as [K, N]."""
    x = jnp.asarray(matrix(64, 5), jnp.float16)
    q = fp4.quantize(x, fp4.MXFP4, axis=0)
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, {"dense": {"kernel": q}}, convention="compressed-tensors")
    found = checkpoint.load(path)["dense.kernel"]
    assert isinstance(found, fp4.BlockScaledArray)
    assert (found.axis, found.shape, found.dtype) == (-2, (64, 5), np.float16)
    assert (fp4.dequantize(found) == fp4.dequantize(q)).all()


def test_sharded_checkpoints_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Several files and an index, parts of a tensor in different files: the same bytes again."""
    parts, values = stored_parts("modelopt", NAME, "NVFP4", matrix(5, 64))
    split = [dict(list(parts.items())[:1]), dict(list(parts.items())[1:])]
    source = tmp_path / "source"
    source.mkdir()
    where = {}
    for i, tensors in enumerate(split):
        file = f"part-{i}.safetensors"
        write_raw(source / file, tensors, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint(source) as opened:
        found = fp4.dequantize(opened[NAME], jnp.float32)  # type: ignore[arg-type]
        assert np.asarray(found).tobytes() == values.astype(np.float32).tobytes()
        checkpoint.save(tmp_path / "again", opened)
    names = sorted(p.name for p in source.iterdir())
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()


def test_a_full_file_begins_another(tmp_path: Path) -> None:
    """max_shard_bytes: every tensor in one file, an index, and the same tree again."""
    tree = {f"w{i}": np.full(100, i, np.float32) for i in range(5)}
    checkpoint.save(tmp_path / "m", tree, convention="modelopt", max_shard_bytes=900)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    again = checkpoint.load(tmp_path / "m")
    assert list(again) == list(tree)
    assert all((again[name] == tree[name]).all() for name in tree)


def test_fused_projections_are_one_array(tmp_path: Path) -> None:
    """Rows of several projections with one tensor scale are one array; with two, an error."""
    x = jnp.asarray(matrix(12, 64))
    q, k = fp4.quantize(x[:8], amax=5.0), fp4.quantize(x[8:], amax=5.0)
    both = fp4.quantize(x, amax=5.0)
    fused = checkpoint.fuse([q, k])
    assert fused.shape == (12, 64)
    for part in ("values", "scales", "global_scale"):
        assert (np.asarray(getattr(fused, part)) == np.asarray(getattr(both, part))).all()
    with pytest.raises(ValueError, match=r"arrays\[1\]. must be of global_scale .*amax"):
        checkpoint.fuse([q, fp4.quantize(x[8:], amax=6.0)])
    with pytest.raises(ValueError, match=r"arrays\[1\]. must be of length 64, got 32"):
        checkpoint.fuse([q, fp4.quantize(x[8:, :32], amax=5.0)])


@pytest.mark.parametrize(
    ("name", "stored"),
    [("m.input_scale", np.float32(3.0 / 2688)), ("m.input_global_scale", np.float32([2688 / 3.0]))],
)
def test_static_activation_scales_give_an_amax(
    tmp_path: Path, name: str, stored: np.ndarray
) -> None:
    """Of both conventions, through a file, to within two roundings."""
    path = tmp_path / "m.safetensors"
    checkpoint.save(path, {name: np.asarray(stored)}, convention="modelopt")
    tree = checkpoint.load(path)
    amax = checkpoint.activation_amax(tree, "m.weight")
    assert amax is not None
    assert abs(float(amax) - 3.0) <= 2 * 3.0 * 2**-23
    assert checkpoint.activation_amax(tree, "n.weight") is None
    q = fp4.quantize(jnp.ones((2, 32)), amax=amax)
    assert q.amax == amax


@pytest.mark.parametrize(("convention", "byte"), [("modelopt", 0x38), ("compressed-tensors", 0x20)])
def test_zero_blocks_get_the_scale_of_the_convention(convention: str, byte: int) -> None:
    """Only blocks of zeros do; every value stays; a tensor of zeros gets the tensor scale 1."""
    x = matrix(4, 64)
    x[1] = 0
    x[2, 16:32] = -0.0
    x[3, :16] = 1e-12  # a scale that rounds to 0 while the codes are not
    q = fp4.quantize(jnp.asarray(x))
    filled = checkpoint.fill_zero_scales(q, convention)
    expected = quantizer.quantize(x, "NVFP4").scales.copy()
    zero = [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 1)]
    assert expected[3, 0] == 0
    for where in zero:
        expected[where] = byte
    assert np.asarray(filled.scales).tobytes() == expected.tobytes()
    same = np.asarray(fp4.dequantize(filled)).tobytes()
    assert same == np.asarray(fp4.dequantize(q)).tobytes()
    zeros = checkpoint.fill_zero_scales(fp4.quantize(jnp.zeros((2, 16))), convention)
    assert zeros.global_scale == 1 and (np.asarray(zeros.scales) == byte).all()


def test_a_tensor_scale_of_another_array_is_refused(tmp_path: Path) -> None:
    """A tree whose array was requantized but whose tensor scale was not is not written."""
    parts, _ = stored_parts("modelopt", NAME, "NVFP4", matrix(4, 32))
    tree = checkpoint.load(write_raw(tmp_path / "m.safetensors", parts))
    tree[NAME] = fp4.quantize(jnp.asarray(matrix(4, 32) * 3))
    with pytest.raises(CheckpointError, match=r"weight_scale_2. must be the tensor scale of .*"):
        checkpoint.save(tmp_path / "again.safetensors", tree, convention="modelopt")
    del tree[NAME + "_scale_2"]
    checkpoint.save(tmp_path / "again.safetensors", tree, convention="modelopt")
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["again.safetensors", "m.safetensors"]
