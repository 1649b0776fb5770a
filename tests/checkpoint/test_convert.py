"""`python -m jax_fp4 convert`: the bytes are the oracle's, whatever the slabs and sources."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import checkpoint
from jax_fp4.checkpoint import Checkpoint
from jax_fp4.cli import main
from jax_fp4.convert import job, quantizing
from oracles import pack, quantizer, tables
from support.checkpoints import bf16, stored_parts, write_raw

# Rows and lengths that do not divide a slab; q, k and v share a tensor scale.
SHAPES = {
    "model.embed_tokens.weight": (10, 32),
    "model.layers.0.self_attn.q_proj.weight": (8, 64),
    "model.layers.0.self_attn.k_proj.weight": (5, 64),
    "model.layers.0.self_attn.v_proj.weight": (4, 64),
    "model.layers.0.mlp.down_proj.weight": (7, 96),
    "model.layers.0.mlp.odd.weight": (6, 40),
    "model.norm.weight": (64,),
}
FUSED = [name for name in SHAPES if "self_attn" in name]
KEPT = ["model.embed_tokens.weight", "model.layers.0.mlp.odd.weight", "model.norm.weight"]


def values() -> dict[str, np.ndarray]:
    """f32 values that bfloat16 holds, with zero blocks, a tiny block and a tensor of zeros."""
    generator = np.random.default_rng(3)
    found = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        x = tables.round_to_bf16(generator.standard_normal(shape).astype(np.float32) * 2.0**i)
        if len(shape) == 2:
            x[0, :32] = 0
            x[1, 16:32] = 2.0**-40
        found[name] = x
    return found


VALUES = values()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a bf16 checkpoint in two files, a tokenizer and a configuration."""
    folder = tmp_path / "in"
    folder.mkdir()
    names = list(SHAPES)
    where = {}
    for i, part in enumerate((names[:3], names[3:])):
        file = f"model-{i}.safetensors"
        tensors = {name: ("BF16", SHAPES[name], bf16(VALUES[name])) for name in part}
        write_raw(folder / file, tensors, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def convert(source: Path, out: Path, *arguments: str) -> None:
    assert main(["convert", str(source), str(out), *arguments]) == 0


def expected_parts(convention: str, name: str, format: str) -> dict[str, Any]:
    """What the oracle stores, with the scales that the convention gives zero blocks."""
    x = VALUES[name]
    group = FUSED if name in FUSED else [name]
    amax = max(float(np.abs(VALUES[member]).max()) for member in group)
    parts, _ = stored_parts(convention, name, format, x, amax=amax)
    if format == "NVFP4":
        key = name + "_scale"
        dtype, shape, data = parts[key]
        scales = np.frombuffer(data, np.uint8).reshape(shape).copy()
        zero = ~np.abs(x).reshape(*shape, 16).any(axis=-1)
        scales[zero] = {"modelopt": 0x38, "compressed-tensors": 0x20}[convention]
        parts[key] = (dtype, shape, scales.tobytes())
    return parts


@pytest.mark.parametrize(
    ("convention", "to", "format", "slab_bytes"),
    [
        ("modelopt", "nvfp4", "NVFP4", 4 << 20),
        ("modelopt", "nvfp4", "NVFP4", 1),
        ("compressed-tensors", "nvfp4", "NVFP4", 300),
        ("compressed-tensors", "mxfp4", "MXFP4", 4 << 20),
        ("modelopt", "mxfp6", "MXFP6_E2M3", 300),
        ("modelopt", "mxfp8", "MXFP8_E4M3", 4 << 20),
    ],
)
def test_stored_bytes_are_the_oracles(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    convention: str,
    to: str,
    format: str,
    slab_bytes: int,
) -> None:
    """Codes, scales, shared tensor scales and kept tensors; also a row at a time."""
    monkeypatch.setattr(job, "SLAB_BYTES", slab_bytes)
    convert(source, tmp_path / "out", "--to", to, "--convention", convention)
    with Checkpoint(tmp_path / "out") as found:
        left = set(found.entries)
        for name in SHAPES:
            if name in KEPT:
                assert found.stored(name).tobytes() == bf16(VALUES[name])
                left.remove(name)
                continue
            for part, (dtype, shape, data) in expected_parts(convention, name, format).items():
                assert (found.entries[part].dtype, found.entries[part].shape) == (dtype, shape)
                assert found.stored(part).tobytes() == data, part
                left.remove(part)
        assert left == set()
        assert found.metadata["format"] == "pt"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [
            "config.json",
            "convert_report.json",
            "convert_report.png",
            "convert_report.txt",
            "model.safetensors",
            "tokenizer.json",
            *(["hf_quant_config.json"] if (convention, to) in MODELOPT_FILES else []),
        ]
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


# MXFP8 is described as compressed-tensors does, which has a format for it.
MODELOPT_FILES = {("modelopt", "nvfp4"), ("modelopt", "mxfp6")}


def test_four_over_six_is_the_quantizers(source: Path, tmp_path: Path) -> None:
    """The method "four-over-six" stores what the oracle's option gives."""
    convert(source, tmp_path / "out", "--to", "nvfp4", "--method", "four-over-six")
    name = "model.layers.0.mlp.down_proj.weight"
    q = quantizer.quantize(VALUES[name], "NVFP4", four_over_six=True)
    with Checkpoint(tmp_path / "out") as found:
        stored = found.stored(name + "_packed")
        scales = found.stored(name + "_scale").view(np.uint8)
    assert stored.tobytes() == pack.pack(q.codes, 4)[:, :48].tobytes()
    zero = ~np.abs(VALUES[name]).reshape(7, 6, 16).any(axis=-1)
    assert (scales[~zero] == q.scales[~zero]).all() and zero.sum() == 2


def test_the_search_finds_the_best_candidate() -> None:
    """NVFP4 "mse": codes are the chain's for the chosen scale, and no candidate is better.

    "Better" up to the rounding of f32 sums of 16 squares: 2**-18 of the error and of what rounding
    x itself can make.
    """
    generator = np.random.default_rng(0)
    x = (generator.standard_normal((64, 512)) * np.exp(generator.standard_normal((64, 1)))).astype(
        np.float32
    )
    x[0, :16], x[1, :16], x[2, :16] = 0, 1e-12, -0.0
    amax = quantizing.amax(x)
    slab = quantizing.quantize_rows(x, fp4.NVFP4, "mse", amax, "gpt-oss")
    plain = quantizer.quantize(x, "NVFP4")
    encode, factor = quantizer.tensor_scales(quantizer.FORMATS["NVFP4"], amax, False)
    assert slab.global_scale == factor
    blocks = x.reshape(64, 32, 16)

    def codes_for(scales: np.ndarray) -> np.ndarray:
        multiplier = quantizer._nvfp4_multiplier(scales, encode)
        with np.errstate(over="ignore"):
            return tables.round_nearest("e2m1", blocks * multiplier[..., None])

    def error_of(scales: np.ndarray) -> np.ndarray:
        scale = tables.VALUES["ue4m3"][scales] * np.float64(factor)
        found = tables.VALUES["e2m1"][codes_for(scales)] * scale[..., None]
        return ((found - blocks) ** 2).sum(axis=-1)

    assert pack.pack(codes_for(slab.scales).reshape(64, 512), 4).tobytes() == slab.codes.tobytes()
    chosen = error_of(slab.scales)
    slack = 2.0**-18 * (chosen + (blocks.astype(np.float64) ** 2).sum(axis=-1) * 2.0**-6)
    for step in range(-2, 6):
        scales = np.clip(plain.scales.astype(int) + step, 1, 0x7E).astype(np.uint8)
        scales = np.where(plain.scales == 0, plain.scales, scales)
        assert (chosen <= error_of(scales) + slack).all(), step
    steps = slab.scales.astype(int) - plain.scales
    assert set(np.unique(steps)) == set(range(-2, 6))
    assert chosen.sum() < 0.8 * error_of(plain.scales).sum()


@pytest.mark.parametrize("format", ["MXFP4", "MXFP6_E3M2", "MXFP8_E4M3"])
def test_mx_scales_are_the_better_of_two_rules(format: str) -> None:
    """MX "mse": each block is the oracle's by "rceil" or by "floor", whichever is closer."""
    x = np.random.default_rng(1).standard_normal((32, 256)).astype(np.float32)
    target = {f.name: f for f in fp4.FORMATS}[format]
    slab = quantizing.quantize_rows(x, target, "mse", np.float32(1), "modelopt")
    both = [quantizer.quantize(x, format, scale_rule=rule) for rule in ("rceil", "floor")]
    errors = [((q.values() - x) ** 2).reshape(32, 8, 32).sum(axis=-1) for q in both]
    clear = np.abs(errors[0] - errors[1]) > 1e-5 * errors[0]
    floor = errors[1] < errors[0]
    expected = np.where(floor, both[1].scales, both[0].scales)
    assert (slab.scales[clear] == expected[clear]).all()
    codes = np.where(np.repeat(floor, 32, axis=1), both[1].codes, both[0].codes)
    found = pack.unpack(slab.codes, target.bits, 256)
    same = np.repeat(clear, 32, axis=1)
    assert (found[same] == codes[same]).all()
    assert floor[clear].any() or format == "MXFP8_E4M3"
    assert ((slab.scales == both[0].scales) | (slab.scales == both[1].scales)).all()


@pytest.mark.parametrize("to", ["nvfp4", "mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_report_has_the_relative_error(tmp_path: Path, to: str, dtype: str) -> None:
    """That of the dequantized values, to four digits; bytes are those of the file."""
    x = np.random.default_rng(2).standard_normal((6, 64)).astype(np.float32)
    data = {
        "float32": ("F32", x.tobytes()),
        "float16": ("F16", x.astype(np.float16).tobytes()),
        "bfloat16": ("BF16", bf16(x)),
    }[dtype]
    path = write_raw(tmp_path / "in.safetensors", {"w.weight": (data[0], (6, 64), data[1])})
    exact = {
        "float32": x,
        "float16": x.astype(np.float16).astype(np.float32),
        "bfloat16": tables.round_to_bf16(x),
    }[dtype]
    convert(path, tmp_path / "out", "--to", to)
    found = checkpoint.load(tmp_path / "out")["w.weight"]
    assert isinstance(found, fp4.BlockScaledArray) and found.dtype.name == dtype
    report = json.loads((tmp_path / "out" / "convert_report.json").read_text())
    difference = np.asarray(fp4.dequantize(found, np.float32), np.float64) - exact
    expected = np.linalg.norm(difference) / np.linalg.norm(exact.astype(np.float64))
    (line,) = report["tensors"]
    assert line["relative_error"] == pytest.approx(expected, rel=1e-4)
    assert line["bytes_in"] == 6 * 64 * (4 if dtype == "float32" else 2)
    assert line["bytes_out"] == report["bytes_out"]
    table = (tmp_path / "out" / "convert_report.txt").read_text()
    assert f"{expected:.5f}"[:6] in table


def test_amax_is_over_finite_values() -> None:
    """Of every dtype; NaN and Inf do not count, subnormals do."""
    values = [[1, -3, np.nan, -np.inf]]
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert quantizing.amax(np.array(values, dtype)) == 3
    assert quantizing.amax(np.array([[1e-45, 0]], np.float32)) == np.float32(1e-45)
    assert quantizing.amax(np.zeros((2, 0), np.float32)) == 0


def test_kernels_of_npz_files_are_quantized_along_their_first_axis(tmp_path: Path) -> None:
    """kernel [K, N] becomes N rows of K; the tree has it as [K, N] again."""
    x = np.random.default_rng(5).standard_normal((64, 5)).astype(np.float32)
    np.savez(tmp_path / "in.npz", **{"dense.kernel": x, "dense.bias": x[0], "step": np.int64(7)})
    convert(tmp_path / "in.npz", tmp_path / "out", "--to", "nvfp4", "--convention", "modelopt")
    tree = checkpoint.load(tmp_path / "out")
    q = tree["dense.kernel"]
    assert isinstance(q, fp4.BlockScaledArray) and (q.shape, q.axis) == ((64, 5), -2)
    expected = quantizer.quantize(x, "NVFP4", axis=0).dequantize().T
    assert (np.asarray(fp4.dequantize(q)) == expected).all()
    assert (tree["dense.bias"] == x[0]).all() and tree["step"] == 7
    # The same from safetensors.
    write_raw(tmp_path / "in.safetensors", {"dense.kernel": ("F32", (64, 5), x.tobytes())})
    convert(tmp_path / "in.safetensors", tmp_path / "out2", "--to", "nvfp4")
    again = checkpoint.load(tmp_path / "out2")["dense.kernel"]
    assert (np.asarray(again.values) == np.asarray(q.values)).all()


def test_experts_in_one_tensor_have_a_scale_each(tmp_path: Path) -> None:
    """[E, N, K]: an amax for each leading index."""
    x = np.stack([np.random.default_rng(i).standard_normal((3, 32)) * 4.0**i for i in range(3)])
    x = x.astype(np.float32)
    write_raw(tmp_path / "in.safetensors", {"e.weight": ("F32", (3, 3, 32), x.tobytes())})
    convert(tmp_path / "in.safetensors", tmp_path / "out", "--to", "nvfp4")
    q = checkpoint.load(tmp_path / "out")["e.weight"]
    for i in range(3):
        expected = quantizer.quantize(x[i], "NVFP4")
        one = np.float32(1)
        assert np.asarray(q.global_scale)[i] == one / (one / expected.global_scale)
        assert (pack.unpack(np.asarray(q.values)[i], 4, 32) == expected.codes).all()


def test_rules_assign_a_format_to_each_tensor(source: Path, tmp_path: Path) -> None:
    """--to mixed: the first rule that matches decides; fused names are those of the file."""
    rules = tmp_path / "rules.toml"
    rules.write_text(
        """
        fused = [["q_proj", "k_proj"]]
        [[rule]]
        match = ["*.v_proj.*", "*norm*"]
        format = "keep"
        [[rule]]
        match = "*.mlp.*"
        format = "mxfp8"
        [[rule]]
        match = "*"
        format = "nvfp4"
        """
    )
    convert(source, tmp_path / "out", "--to", "mixed", "--rules", str(rules))
    tree = checkpoint.load(tmp_path / "out")
    formats = {
        name.split(".")[-2]: tree[name].format.name
        for name in SHAPES
        if isinstance(tree[name], fp4.BlockScaledArray)
    }
    assert formats == {
        "embed_tokens": "NVFP4",
        "q_proj": "NVFP4",
        "k_proj": "NVFP4",
        "down_proj": "MXFP8_E4M3",
    }
    q, k = (tree[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")
    assert q.global_scale == k.global_scale
    checkpoint.fuse([q, k])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {g["format"]: g["targets"] for g in config["config_groups"].values()} == {
        "nvfp4-pack-quantized": [
            "model.embed_tokens",
            "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.q_proj",
        ],
        "mxfp8-quantized": ["model.layers.0.mlp.down_proj"],
    }
