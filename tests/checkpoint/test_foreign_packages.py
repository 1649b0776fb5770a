"""Models saved by ModelOpt, compressed-tensors and transformers, and ours loaded by them.

`make test-checkpoints` runs this in an environment of its own, with torch and those packages.

How values compare. ModelOpt decodes fl(code * fl(scale * factor)), compressed-tensors
fl(code * fl(scale / divisor)), ours is fl(fl(code * scale) * factor). code * scale is exact, so
ours rounds once, and once more for factor = fl(1 / divisor); theirs round twice. So f32 values are
at most three, or four, roundings of 2**-24 apart. Their own order, from the parts that we read,
must give their bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import checkpoint
from jax_fp4.checkpoint import Checkpoint
from jax_fp4.cli import main
from oracles import pack, tables

pytestmark = [
    pytest.mark.checkpoints,
    pytest.mark.filterwarnings("ignore"),  # those packages' own
]


def tiny_model(seed: int = 0) -> Any:
    """A two-layer Llama in bfloat16."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def tokens() -> Any:
    import torch

    return torch.arange(32).reshape(2, 16)


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as transformers saves it."""
    folder = tmp_path_factory.mktemp("bf16")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def modelopt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model calibrated, quantized to NVFP4 and exported by ModelOpt."""
    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    folder = tmp_path_factory.mktemp("modelopt")
    model = quantization.quantize(
        tiny_model(), quantization.NVFP4_DEFAULT_CFG, lambda model: model(tokens())
    )
    export_hf_checkpoint(model, export_dir=folder)
    return folder


def compressed_model(preset: str) -> tuple[Any, dict[str, Any]]:
    """The model compressed by compressed-tensors, and its fake-quantized weights before that."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = tiny_model()
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])}, ignore=["lm_head"]
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        weight = module.weight.detach()
        groups = weight.reshape(weight.shape[0], -1, scheme.weights.group_size)
        lowest, highest = groups.amin(-1), groups.amax(-1)
        global_scale = None
        if hasattr(module, "weight_global_scale"):
            global_scale = generate_gparam(lowest.min().float(), highest.max().float())
            module.weight_global_scale.data = global_scale
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data = torch.tensor([2688 / 3.0])
        scale, _ = calculate_qparams(lowest, highest, scheme.weights, global_scale=global_scale)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return model, compressor


@pytest.fixture(scope="module", params=["NVFP4", "MXFP4", "MXFP6A16", "MXFP8"])
def compressed_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The model compressed and saved by compressed-tensors."""
    folder = tmp_path_factory.mktemp(request.param)
    model, compressor = compressed_model(request.param)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def quantized(folder: Path) -> dict[str, fp4.BlockScaledArray]:
    tree = checkpoint.load(folder)
    found = {n: v for n, v in tree.items() if isinstance(v, fp4.BlockScaledArray)}
    assert len(found) == 14, sorted(tree)
    return found


def in_their_order(q: fp4.BlockScaledArray, scale: np.ndarray) -> np.ndarray:
    """fl(code * scale), f32, with f32 scales [rows, blocks] that are rounded as theirs are."""
    kind = {"e2m1": 4, "e2m3": 6, "e4m3": 8}[q.format.element]
    codes = pack.unpack(np.asarray(q.values), kind, q.length)
    values = tables.VALUES[q.format.element][codes].astype(np.float32)
    return values * np.repeat(scale, q.format.block, axis=-1)


def check_close(ours: Any, theirs: np.ndarray, roundings: int) -> None:
    """Within so many roundings of f32, for each element."""
    found = np.asarray(ours, np.float64)
    bound = roundings * 2.0**-24 * (1 + 2.0**-20) * np.abs(theirs.astype(np.float64))
    assert (np.abs(found - theirs) <= bound).all()


def test_modelopt_values(modelopt_folder: Path) -> None:
    """Every weight is what ModelOpt's own dequantization gives."""
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from safetensors.torch import load_file

    theirs = load_file(modelopt_folder / "model.safetensors")
    tree = checkpoint.load(modelopt_folder)
    for name, q in quantized(modelopt_folder).items():
        packed = theirs[name]
        tensor = NVFP4QTensor(torch.Size(q.shape), torch.float32, packed)
        expected = tensor.dequantize(
            dtype=torch.float32,
            scale=theirs[f"{name}_scale"],
            double_scale=theirs[f"{name}_scale_2"],
            block_sizes={-1: 16},
        ).numpy()
        scale = tables.VALUES["ue4m3"][np.asarray(q.scales)].astype(np.float32)
        assert np.array_equal(in_their_order(q, scale * np.asarray(q.global_scale)), expected)
        check_close(fp4.dequantize(q, jnp.float32), expected, 3)
        amax = checkpoint.activation_amax(tree, name)
        stored = float(theirs[name.removesuffix("weight") + "input_scale"])
        assert amax == np.float32(stored * 2688)


def test_modelopt_shares_scales_and_we_fuse(modelopt_folder: Path) -> None:
    """q, k and v have one tensor scale in ModelOpt's export; they become one array."""
    found = quantized(modelopt_folder)
    parts = [found[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert checkpoint.fuse(parts).shape == (128, 64)


def test_round_trips_are_byte_identical(modelopt_folder: Path, tmp_path: Path) -> None:
    """ModelOpt's file, read and written again."""
    with Checkpoint(modelopt_folder) as opened:
        checkpoint.save(tmp_path / "again.safetensors", opened)
    original = (modelopt_folder / "model.safetensors").read_bytes()
    assert (tmp_path / "again.safetensors").read_bytes() == original
    tree = checkpoint.load(modelopt_folder)
    checkpoint.save(
        tmp_path / "tree.safetensors",
        tree,
        convention="modelopt",
        metadata={"format": "pt"},
        checksums=False,
    )
    assert (tmp_path / "tree.safetensors").read_bytes() == original


def test_round_trips_of_compressed_tensors(compressed_folder: Path, tmp_path: Path) -> None:
    """Of every format: read and written again, as a Checkpoint and as a tree."""
    original = (compressed_folder / "model.safetensors").read_bytes()
    with Checkpoint(compressed_folder) as opened:
        checkpoint.save(tmp_path / "again.safetensors", opened)
    assert (tmp_path / "again.safetensors").read_bytes() == original
    checkpoint.save(
        tmp_path / "tree.safetensors",
        checkpoint.load(compressed_folder),
        convention="compressed-tensors",
        metadata={"format": "pt"},
        checksums=False,
    )
    assert (tmp_path / "tree.safetensors").read_bytes() == original


def decompressed(folder: Path) -> dict[str, np.ndarray]:
    """The weights as transformers and compressed-tensors load and decompress them, bf16 as f32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    logits = model(tokens()).logits  # decompresses
    assert bool(torch.isfinite(logits).all())
    return {
        name: value.detach().float().numpy()
        for name, value in model.state_dict().items()
        if name.endswith("proj.weight")
    }


def check_decompressed(folder: Path) -> None:
    """Their weights are ours: bit for bit in their order, and after our own rounding to bf16."""
    theirs = decompressed(folder)
    tree = checkpoint.load(folder)
    found = quantized(folder)
    assert set(theirs) == set(found)
    for name, q in found.items():
        if q.format is fp4.NVFP4:
            divisor = np.asarray(tree[name + "_global_scale"])
            scale = tables.VALUES["ue4m3"][np.asarray(q.scales)].astype(np.float32) / divisor
        else:
            scale = tables.VALUES["ue8m0"][np.asarray(q.scales)].astype(np.float32)
        wide = in_their_order(q, scale)
        assert np.array_equal(tables.round_to_bf16(wide), theirs[name])
        check_close(fp4.dequantize(q, jnp.float32), wide, 4 if q.format is fp4.NVFP4 else 0)


def test_compressed_tensors_values(compressed_folder: Path) -> None:
    """Every weight is what compressed-tensors itself decompresses."""
    check_decompressed(compressed_folder)


@pytest.mark.parametrize("to", ["nvfp4", "mxfp4", "mxfp6", "mxfp8"])
def test_transformers_loads_what_we_convert(bf16_folder: Path, tmp_path: Path, to: str) -> None:
    """Our checkpoint and configuration: loaded, decompressed and run by transformers."""
    out = tmp_path / "out"
    assert main(["convert", str(bf16_folder), str(out), "--to", to]) == 0
    check_decompressed(out)


def test_modelopt_reads_what_we_convert(bf16_folder: Path, tmp_path: Path) -> None:
    """ModelOpt's tensors from our file, and its converter from our configuration."""
    import torch
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from safetensors.torch import load_file

    out = tmp_path / "out"
    arguments = ["--to", "nvfp4", "--convention", "modelopt"]
    assert main(["convert", str(bf16_folder), str(out), *arguments]) == 0
    theirs = load_file(out / "model.safetensors")
    for name, q in quantized(out).items():
        tensor = NVFP4QTensor(torch.Size(q.shape), torch.bfloat16, theirs[name])
        value = tensor.dequantize(
            dtype=torch.float32,
            scale=theirs[f"{name}_scale"],
            double_scale=theirs[f"{name}_scale_2"],
            block_sizes={-1: 16},
        )
        check_close(fp4.dequantize(q, jnp.float32), value.numpy(), 3)
    described = json.loads((out / "hf_quant_config.json").read_text())
    converted = convert_hf_quant_config_format(described)
    (group,) = converted["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (4, 16)
    assert "lm_head" in converted["ignore"]


def test_the_modelopt_converter_of_compressed_tensors_agrees(modelopt_folder: Path) -> None:
    """ModelOpt's file in compressed-tensors' convention: the same weights here."""
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
    from safetensors.torch import load_file, save_file

    theirs = load_file(modelopt_folder / "model.safetensors")
    converter = ModelOptNvfp4Converter(targets=["re:.*proj.*"])
    folder = modelopt_folder.parent / "converted"
    folder.mkdir()
    converted = {k: v.reshape(v.shape or (1,)) for k, v in converter.process(theirs).items()}
    save_file(converted, folder / "model.safetensors")
    ours = quantized(modelopt_folder)
    for name, q in quantized(folder).items():
        for part in ("values", "scales"):
            assert (np.asarray(getattr(q, part)) == np.asarray(getattr(ours[name], part))).all()
        check_close(q.global_scale, np.asarray(ours[name].global_scale), 2)


def test_orbax_checkpoints_are_converted(tmp_path: Path) -> None:
    """A pytree saved by orbax: names joined by dots, kernels quantized along axis 0."""
    from orbax import checkpoint as orbax

    x = np.random.default_rng(0).standard_normal((64, 5)).astype(np.float32)
    tree = {
        "params": {
            "dense": {"kernel": jnp.asarray(x, jnp.bfloat16), "bias": jnp.asarray(x[0])},
            "layers": [{"kernel": jnp.asarray(x)}],
        }
    }
    orbax.PyTreeCheckpointer().save(tmp_path / "in", tree)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "mxfp4"]) == 0
    found = checkpoint.load(tmp_path / "out")
    for name, expected in (
        ("params.dense.kernel", jnp.asarray(x, jnp.bfloat16)),
        ("params.layers.0.kernel", jnp.asarray(x)),
    ):
        q, mine = found[name], fp4.quantize(expected, fp4.MXFP4, axis=0)
        assert q.shape == (64, 5)
        assert (np.asarray(q.values) == np.asarray(mine.values)).all()
        assert (np.asarray(q.scales) == np.asarray(mine.scales)).all()
    assert (found["params.dense.bias"] == x[0]).all()
