"""Damaged, truncated and foreign files: an error that names the file, never a crash or wrong data.

A damaged file may still be read where nothing is lost: then it gives the same tree.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import checkpoint
from jax_fp4.checkpoint import CheckpointError
from support.checkpoints import file_bytes, header_of, stored_parts, write_raw

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
PLAIN = {"a": ("F32", (2, 2), bytes(range(16))), "b": ("U8", (3,), b"abc")}


def leaves(tree: dict[str, Any]) -> dict[str, Any]:
    """Everything in a tree that can be compared."""
    return {
        name: (
            (str(v.format), v.axis, str(v.dtype), *(np.asarray(p).tobytes() for p in parts(v)))
            if isinstance(v, fp4.BlockScaledArray)
            else (v.dtype, v.shape, v.tobytes())
        )
        for name, v in tree.items()
    }


def parts(q: fp4.BlockScaledArray) -> tuple[Any, ...]:
    return q.values, q.scales, q.global_scale


def changed_header(change: Any, tensors: Any = PLAIN) -> bytes:
    """A file whose header was changed by a function."""
    header = header_of(tensors)
    result = change(header)
    header = result if isinstance(result, bytes) else header
    return file_bytes(header, b"".join(t[2] for t in tensors.values()))


def entry(**fields: Any) -> Any:
    """A change of the first tensor's entry."""
    return lambda header: header["a"].update(fields)


def raw(text: bytes) -> Any:
    return lambda header: text


GOOD = changed_header(lambda header: None)
A = '{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'
B = '{"dtype":"U8","shape":[3],"data_offsets":[16,19]}'
# name: (the file, what its error says). The file is called m.safetensors.
HAND_MADE = {
    "empty": (b"", "8 bytes long or longer, got 0 bytes"),
    "seven bytes": (GOOD[:7], "8 bytes long or longer, got 7 bytes"),
    "length only": (GOOD[:8], "bytes long or longer, by its header"),
    "huge length": (b"\xff" * 8 + GOOD[8:], "header of at most 100000000 bytes"),
    "length beyond the file": ((10**6).to_bytes(8, "little") + GOOD[8:], "by its header"),
    "length too short": ((20).to_bytes(8, "little") + GOOD[8:], "a header in JSON"),
    "length zero": ((0).to_bytes(8, "little") + GOOD[8:], 'starts with "{"'),
    "a zip file": (b"PK\x03\x04" + bytes(60), "bytes long or longer, by its header"),
    "a pickle": (b"\x80\x04\x95" + bytes(60), "header of at most|by its header|starts with"),
    "text": (b"hello, this is not a model\n" * 3, "header of at most"),
    "no object": (changed_header(raw(b"[1, 2]")), 'starts with "{"'),
    "blank before": (changed_header(raw(b" {}")), 'starts with "{"'),
    "no JSON": (changed_header(raw(b"{'a': 1}")), "a header in JSON"),
    "no UTF-8": (changed_header(raw(b'{"\xff": 1}')), "a header in JSON.*Unicode"),
    "lone surrogate": (changed_header(raw(b'{"\\ud800": %s}' % A.encode())), "in JSON.*surrogate"),
    "deep nesting": (changed_header(raw(b'{"a":' + b"[" * 200_000)), "in JSON"),
    "not a number": (changed_header(raw(b'{"a": NaN}')), "the number NaN"),
    "twice": (changed_header(raw(f'{{"a":{A},"a":{B}}}'.encode())), "'a' twice"),
    "field twice": (
        changed_header(raw(b'{"a":{"dtype":"F32","dtype":"U8"}}')), "'dtype' twice"),
    "text after": (changed_header(raw(f'{{"a":{A},"b":{B}}}x'.encode())), "in JSON"),
    "entry no object": (changed_header(lambda h: h.update(a=[1])), "a. must be described by"),
    "entry without dtype": (changed_header(lambda h: h["a"].pop("dtype")), "a. must be described"),
    "entry with more": (changed_header(entry(strides=[1])), "a. must be described"),
    "unknown dtype": (changed_header(entry(dtype="F3")), "a. must be of a dtype among.*'F3'"),
    "dtype no string": (changed_header(entry(dtype=32)), "a. must be of a dtype among.*32"),
    "dtype of another size": (changed_header(entry(dtype="F64")), "a. must be 32 bytes.*16 bytes"),
    "packed halves": (
        changed_header(entry(dtype="F4", shape=[33])), "a. must be no whole number of bytes"),
    "shape no list": (changed_header(entry(shape=4)), "a. must be of a shape"),
    "negative size": (changed_header(entry(shape=[-2, -2])), "a. must be of a shape"),
    "fractional size": (changed_header(entry(shape=[2.0, 2])), "a. must be of a shape"),
    "true as size": (changed_header(entry(shape=[True, 4])), "a. must be of a shape"),
    "overflowing shape": (changed_header(entry(shape=[2**62, 4])), r"a. must be \d+ bytes"),
    "shape beyond int64": (changed_header(entry(shape=[2**70])), "a. must be of a shape"),
    "rank 65": (changed_header(entry(shape=[1] * 65)), "a. must be of a shape"),
    "other shape": (changed_header(entry(shape=[2, 3])), "a. must be 24 bytes for F32.*16 bytes"),
    "one offset": (changed_header(entry(data_offsets=[0])), "a. must be at data_offsets"),
    "negative offset": (changed_header(entry(data_offsets=[-16, 0])), "a. must be at data_offsets"),
    "offsets swapped": (changed_header(entry(data_offsets=[16, 0])), "a. must be within the 19"),
    "offset beyond": (changed_header(entry(data_offsets=[8, 24])), "a. must be within the 19"),
    "overlap": (
        changed_header(lambda h: h["b"].update(data_offsets=[15, 18])), "b. must be at byte 16"),
    "hole": (changed_header(entry(data_offsets=[1, 17])), "a. must be at byte 0, got byte 1"),
    "same place": (
        changed_header(lambda h: h.update(c=h["b"])), "must be at byte 19, got byte 16: overlap"),
    "bytes after": (GOOD + b"x", "19 bytes long after its header, got 20"),
    "tensor missing": (changed_header(lambda h: h.pop("b") and None), "16 bytes long.*got 19"),
    "metadata null": (
        changed_header(lambda h: h.update(__metadata__=None)), "__metadata__. must be an object"),
    "metadata list": (
        changed_header(lambda h: h.update(__metadata__=["pt"])), "__metadata__. must be an object"),
    "metadata number": (
        changed_header(lambda h: h.update(__metadata__={"x": 1})), "__metadata__. must be an obj"),
    "checksums missing": (
        changed_header(lambda h: h.update(__metadata__={"jax_fp4.crc32": "00000000"})),
        "crc32. must be 3 checksums"),
    "checksums no numbers": (
        changed_header(lambda h: h.update(__metadata__={"jax_fp4.crc32": "x " * 3})),
        "crc32. must be 3 checksums"),
    "attributes no JSON": (
        changed_header(lambda h: h.update(__metadata__={"jax_fp4": "{"})), "jax_fp4 in JSON"),
    "attributes of nothing": (
        changed_header(lambda h: h.update(__metadata__={"jax_fp4": '{"a": {"axis": -1}}'})),
        "jax_fp4. must be about quantized tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", HAND_MADE)
def test_a_damaged_header_is_an_error(tmp_path: Path, case: str) -> None:
    """It names the file and what is wrong."""
    content, message = HAND_MADE[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.load(path)
    assert f"`{path}" in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("length", range(0, len(GOOD), 7))
def test_a_truncated_file_is_an_error(tmp_path: Path, length: int) -> None:
    """Wherever it ends."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD[:length])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        checkpoint.load(path)


NVFP4 = stored_parts("compressed-tensors", "m.weight", "NVFP4", X)[0]
MODELOPT = stored_parts("modelopt", "m.weight", "NVFP4", X)[0]
GPT_OSS = stored_parts("gpt-oss", "m.experts", "MXFP4", X)[0]
MXFP6 = stored_parts("modelopt", "m.weight", "MXFP6_E2M3", X)[0]


def changed(parts: dict[str, Any], name: str, dtype: str, shape: tuple[int, ...], data: Any) -> Any:
    return {**parts, name: (dtype, shape, bytes(data))}


def without(parts: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in parts.items() if key != name}


S, G, P = "m.weight_scale", "m.weight_global_scale", "m.weight_packed"
MISMATCHED = {
    "no scales": (without(NVFP4, S), f"{S}. must be stored beside {P}, got no such tensor"),
    "no codes": (without(NVFP4, P), f"{P}. must be stored beside {G}"),
    "no tensor scale": (without(NVFP4, G), f"{G}. must be stored beside {P}"),
    "modelopt: no scales": (without(MODELOPT, S), f"{S}. must be stored beside the U8 codes"),
    "modelopt: no codes": (without(MODELOPT, "m.weight"), "m.weight. must be stored beside"),
    "modelopt: no tensor scale": (without(MODELOPT, S + "_2"), f"{S}_2. must be stored beside"),
    "gpt-oss: no scales": (without(GPT_OSS, "m.experts_scales"), "experts_scales. must be stored"),
    "fp6: no scales": (without(MXFP6, S), "m.weight. must be FP6 with U8 scales"),
    "codes of int4": (changed(NVFP4, P, "I32", (4, 8), bytes(128)), f"{P}. must be floats"),
    "both forms": ({**NVFP4, "m.weight": ("BF16", (1,), b"ab")}, f"{P}. must be alone"),
    "fewer scales": (changed(NVFP4, S, "F8_E4M3", (4, 3), bytes(12)), f"{S}. must be of shape"),
    "scales transposed": (
        changed(NVFP4, P, "U8", (8, 16), bytes(128)), rf"{S}. must be of shape \[8, 2\]"),
    "scales tiled": (
        changed(NVFP4, S, "F8_E4M3", (128, 4), bytes(512)), f"{S}. must be of shape .4, 4."),
    "scales f32": (changed(NVFP4, S, "F32", (4, 4), bytes(64)), f"{S}. must be of dtype F8_E4M3"),
    "scales e8m0 typed": (changed(NVFP4, S, "F8_E8M0", (4, 4), bytes(16)), f"{S}. must be of"),
    "codes of rank 1": (changed(NVFP4, P, "U8", (128,), bytes(128)), f"{P}. must be of rank 2"),
    "odd length": (changed(NVFP4, P, "U8", (4, 31), bytes(124)), f"{P}. must be a multiple of 16"),
    "blocks of 32 in E4M3": (
        changed(NVFP4, S, "F8_E4M3", (4, 2), bytes(8)), rf"{S}. must be of shape \[4, 4\]"),
    "tensor scale f16": (changed(NVFP4, G, "F16", (1,), b"ab"), f"{G}. must be one F32"),
    "two tensor scales": (changed(NVFP4, G, "F32", (2,), bytes(8)), f"{G}. must be one F32"),
    "tensor scale 0": (changed(NVFP4, G, "F32", (1,), bytes(4)), f"{G}. must be positive and fin"),
    "tensor scale NaN": (
        changed(NVFP4, G, "F32", (1,), b"\0\0\xc0\x7f"), f"{G}. must be positive and finite"),
    "tensor scale -1": (
        changed(MODELOPT, S + "_2", "F32", (), b"\0\0\x80\xbf"), f"{S}_2. must be positive.*-1.0"),
    "tensor scale infinite": (
        changed(MODELOPT, S + "_2", "F32", (), b"\0\0\x80\x7f"), f"{S}_2. must be positive.*inf"),
    "negative scale": (
        changed(NVFP4, S, "F8_E4M3", (4, 4), b"\x30" * 15 + b"\x81"), f"{S}. must be without neg"),
    "gpt-oss: E4M3 scales": (
        changed(GPT_OSS, "m.experts_scales", "F8_E4M3", (4, 2), bytes(8)), "must be of dtype U8"),
    "gpt-oss: another block": (
        changed(GPT_OSS, "m.experts_blocks", "U8", (4, 1, 16), bytes(64)),
        r"m.experts_scales. must be of shape \[4, 1\]"),
    "fp6: of rank 1": (changed(MXFP6, "m.weight", "F6_E2M3", (256,), bytes(192)), "of rank 2"),
    "fp4 as a dtype": ({"x": ("F4", (2, 2), b"ab")}, "x. must be FP6 with U8 scales"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHED)
def test_parts_that_do_not_fit_together_are_an_error(tmp_path: Path, case: str) -> None:
    """It names file and tensor, and nothing is loaded."""
    tensors, message = MISMATCHED[case]
    path = write_raw(tmp_path / "m.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.load(path)
    assert str(tmp_path) in str(raised.value)


def index_of(where: Any) -> str:
    return json.dumps({"metadata": {}, "weight_map": where})


# What is in the folder beside one.safetensors with a and b; None: no index.
FOLDERS = {
    "index no JSON": ("{", "an index in JSON"),
    "index no object": ("[]", "a JSON object"),
    "no weight_map": ("{}", "weight_map. must be an object of file names"),
    "weight_map of numbers": (index_of({"a": 1}), "weight_map. must be an object"),
    "missing file": (index_of({"a": "two.safetensors"}), "two.safetensors. must be a file"),
    "path upwards": (index_of({"a": "../x.safetensors"}), "names of .safetensors files beside"),
    "absolute path": (index_of({"a": "/x.safetensors"}), "names of .safetensors files beside"),
    "other suffix": (index_of({"a": "model.bin"}), "names of .safetensors files beside"),
    "tensor not in index": (index_of({"a": "one.safetensors"}), "b. must be in one.safetensors"),
    "tensor not in file": (
        index_of(dict.fromkeys("abc", "one.safetensors")), "c. must be in this file, by the index"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_an_index_that_does_not_fit_is_an_error(tmp_path: Path, case: str) -> None:
    """It names the index or the file."""
    index, message = FOLDERS[case]
    write_raw(tmp_path / "one.safetensors", PLAIN)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_folders_that_do_not_say_what_they_hold_are_an_error(tmp_path: Path) -> None:
    """No file, several files without an index, several indices, no folder at all."""
    with pytest.raises(CheckpointError, match=r"one .safetensors file, got none"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match="a file that can be read, got No such file"):
        checkpoint.load(tmp_path / "absent.safetensors")
    for name in ("one", "two"):
        write_raw(tmp_path / f"{name}.safetensors", PLAIN)
    with pytest.raises(CheckpointError, match=r"got one.safetensors, two.safetensors"):
        checkpoint.load(tmp_path)
    for name in ("x", "y"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a folder with one index"):
        checkpoint.load(tmp_path)


def damage(content: bytes, generator: random.Random) -> bytes:
    """One to three random changes of a file: bits, bytes, pieces, numbers of the header."""
    data = bytearray(content)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(data)) if data else 0
        # Half of the changes in the header, which is the smaller part.
        if generator.random() < 0.5:
            at = generator.randrange(min(len(data), 400)) if data else 0
        kind = generator.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1 and data:
            data[at] = generator.choice(b'0123456789{}[],:"\x00\xff')
        elif kind == 2:
            del data[at : at + generator.randint(1, 40)]
        elif kind == 3:
            data[at:at] = bytes(generator.randrange(256) for _ in range(generator.randint(1, 8)))
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            other = generator.randrange(len(data) + 1)
            data[at:at] = data[other : other + generator.randint(1, 60)]
        else:
            numbers = [m for m in re.finditer(rb"\d+", bytes(data[8:600]))]
            if numbers:
                number = generator.choice(numbers)
                new = str(generator.choice([0, 1, 15, 16, 2**31, 2**63, 10**30])).encode()
                data[8 + number.start() : 8 + number.end()] = new
    return bytes(data)


@pytest.mark.parametrize("batch", range(8))
def test_fuzzed_files_of_ours_give_an_error_or_the_same_tree(tmp_path: Path, batch: int) -> None:
    """1600 files with checksums: a CheckpointError, or every bit of what was saved."""
    path = tmp_path / "m.safetensors"
    tree = {
        "m.weight": fp4.quantize(jnp.asarray(X)),
        "n.kernel": fp4.quantize(jnp.asarray(X.T), fp4.MXFP6_E3M2, axis=0),
        "norm": np.arange(5, dtype=np.float32),
    }
    checkpoint.save(path, tree, convention="compressed-tensors", metadata={"format": "pt"})
    good = path.read_bytes()
    expected = leaves(checkpoint.load(path))
    generator = random.Random(batch)
    errors = 0
    for _ in range(200):
        content = damage(good, generator)
        path.write_bytes(content)
        try:
            found = leaves(checkpoint.load(path))
        except CheckpointError as error:
            assert str(path) in str(error)
            errors += content != good
            continue
        assert found == expected
    assert errors > 150


@pytest.mark.parametrize("name", ["NVFP4", "MODELOPT", "GPT_OSS", "MXFP6"])
def test_fuzzed_files_of_others_give_an_error_or_a_tree(tmp_path: Path, name: str) -> None:
    """1600 files without checksums: no other exception than CheckpointError, no absurd memory."""
    path = write_raw(tmp_path / "m.safetensors", globals()[name], {"format": "pt"})
    good = path.read_bytes()
    generator = random.Random(name)
    errors = 0
    for _ in range(400):
        path.write_bytes(damage(good, generator))
        try:
            leaves(checkpoint.load(path))
        except CheckpointError as error:
            assert str(path) in str(error)
            errors += 1
    assert errors > 200
