"""What vLLM, compressed-tensors and ModelOpt read about the quantization of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_fp4.checkpoint.conventions import Stored
from jax_fp4.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4, Format

CONFIG_NAME = "config.json"
MODELOPT_CONFIG_NAME = "hf_quant_config.json"

_MODELOPT_ALGORITHM = {NVFP4: "NVFP4", MXFP4: "MXFP4", MXFP8_E4M3: "MXFP8"}
_COMPRESSED_FORMAT = {
    NVFP4: "nvfp4-pack-quantized",
    MXFP4: "mxfp4-pack-quantized",
    MXFP6_E2M3: "mxfp6-pack-quantized",
    MXFP8_E4M3: "mxfp8-quantized",
}


def module_of(tensor: str) -> str:
    """The module that a weight belongs to."""
    return tensor.removesuffix(".weight")


def quantization_files(
    quantized: Sequence[Stored], names: Sequence[str], config: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The JSON files that describe a quantization.

    Args:
        quantized: the quantized tensors, of one convention.
        names: all tensors; modules whose ``.weight`` is not quantized are listed as excluded.
        config: the model's config.json.

    Returns:
        Contents by file name. ``config`` gets an entry ``quantization_config``; ModelOpt has a file
        of its own beside it. Formats that a program does not have are left out.
    """
    if not quantized:
        return {CONFIG_NAME: config}
    known = {s.name: s for s in quantized}
    excluded = sorted(
        module_of(name) for name in names if name.endswith(".weight") and name not in known
    )
    # A scale of the activations beside a weight makes it W4A4; else only weights are quantized.
    static = any(name.endswith(("input_scale", "input_global_scale")) for name in names)
    convention = quantized[0].convention
    if all(s.format.bits == 8 for s in quantized) and convention != "gpt-oss":
        convention = "compressed-tensors"
    if convention == "gpt-oss":
        method = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
        return {CONFIG_NAME: {**config, "quantization_config": method}}
    if convention == "modelopt":
        content = _modelopt(quantized, excluded, static)
        described = {**content["quantization"], "quant_method": "modelopt"}
        described["producer"] = content["producer"]
        return {
            MODELOPT_CONFIG_NAME: content,
            CONFIG_NAME: {**config, "quantization_config": described},
        }
    described = _compressed_tensors(quantized, excluded, static)
    return {CONFIG_NAME: {**config, "quantization_config": described}}


def _modelopt(quantized: Sequence[Stored], excluded: list[str], static: bool) -> dict[str, Any]:
    algorithms = {
        module_of(s.name): (_MODELOPT_ALGORITHM[s.format], s.format.block)
        for s in quantized
        if s.format in _MODELOPT_ALGORITHM
    }
    content: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": excluded}
    if len(set(algorithms.values())) == 1:
        algorithm, block = next(iter(algorithms.values()))
        if algorithm == "NVFP4" and not static:
            algorithm = "W4A16_NVFP4"
        content = {"quant_algo": algorithm, "group_size": block, **content}
    else:
        layers = {m: {"quant_algo": a, "group_size": b} for m, (a, b) in sorted(algorithms.items())}
        content = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, **content}
    return {"producer": {"name": "jax-fp4"}, "quantization": content}


def _compressed_tensors(
    quantized: Sequence[Stored], excluded: list[str], static: bool
) -> dict[str, Any]:
    modules: dict[Format, list[str]] = {}
    for s in quantized:
        if s.format in _COMPRESSED_FORMAT:
            modules.setdefault(s.format, []).append(module_of(s.name))
    groups = {}
    for number, (format, names) in enumerate(modules.items()):
        weights = _arguments(format, dynamic=False)
        activations = _arguments(format, dynamic="local") if format is NVFP4 and static else None
        groups[f"group_{number}"] = {
            "format": _COMPRESSED_FORMAT[format],
            "input_activations": activations,
            "output_activations": None,
            "targets": ["Linear"] if len(modules) == 1 else sorted(names),
            "weights": weights,
        }
    formats = list(modules)
    return {
        "config_groups": groups,
        "format": _COMPRESSED_FORMAT[formats[0]] if len(formats) == 1 else "mixed-precision",
        "ignore": excluded,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _arguments(format: Format, *, dynamic: bool | str) -> dict[str, Any]:
    return {
        "num_bits": format.bits,
        "type": "float",
        "strategy": "tensor_group" if format.tensor_scaled else "group",
        "group_size": format.block,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn" if format.tensor_scaled else "torch.uint8",
    }
