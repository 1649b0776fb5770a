"""What a loader does with quantized tensors: fused projections, static scales of activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_fp4 import _check
from jax_fp4.block_array import BlockScaledArray, check_array


def fuse(arrays: Sequence[BlockScaledArray]) -> BlockScaledArray:
    """One array of several, their rows below each other: for example the q, k and v projections.

    ``dequantize(fuse([q, k, v])) == concatenate([dequantize(q), dequantize(k), dequantize(v)])``,
    along the axis that is not quantized.

    Args:
        arrays: of one format, length and tensor scale, quantized along their last axis [..., N, K].

    Returns:
        An array [..., sum of N, K] with NumPy parts.

    Raises:
        ValueError: they differ in format, length or tensor scale. A shared one is what
            ``python -m jax_fp4 convert`` and the exporters of others give fused projections.
    """
    where = "checkpoint.fuse"
    if not arrays:
        _check.fail(where, "arrays", "one array or more", "none", "name what is to be fused")
    first = check_array(where, "arrays[0]", arrays[0])
    for i, q in enumerate(arrays):
        check_array(where, f"arrays[{i}]", q)
        for name, expected, got in (
            ("format", first.format, q.format),
            ("axis", -1, q.axis),
            ("layout", "linear", q.layout),
            ("length", first.length, q.length),
            ("signs", None, q.signs),
            ("leading dimensions", first.values.shape[:-2], q.values.shape[:-2]),
        ):
            if got != expected:
                _check.fail(where, f"arrays[{i}]", f"of {name} {expected}", f"{got}", "check it")
        if not np.array_equal(np.asarray(q.global_scale), np.asarray(first.global_scale)):
            _check.fail(
                where,
                f"arrays[{i}]",
                f"of global_scale {np.asarray(first.global_scale)}, as the first",
                f"{np.asarray(q.global_scale)}",
                "quantize them with one amax, as `convert` does, or multiply by them one by one",
            )
    return dataclasses.replace(
        first,
        values=np.concatenate([np.asarray(q.values) for q in arrays], axis=-2),
        scales=np.concatenate([np.asarray(q.scales) for q in arrays], axis=-2),
        amax=None,
    )


def activation_amax(tree: Mapping[str, Any], weight: str) -> np.float32 | None:
    """The static amax of a layer's input, for ``quantize(x, NVFP4, amax=...)``.

    ModelOpt stores amax / 2688 as ``input_scale``, compressed-tensors 2688 / amax as
    ``input_global_scale``, with 2688 = 6 * 448; both round, so that amax is good to two units in
    the last place.

    Args:
        tree: what `load` returned, or a Checkpoint.
        weight: name of the layer's weight, for example "model.layers.0.mlp.up_proj.weight".

    Returns:
        float32, or None where the checkpoint has no such scale.

    Raises:
        ValueError: the stored scale is not one positive number.
    """
    prefix = weight.removesuffix("weight")
    for name, factor in ((f"{prefix}input_scale", True), (f"{prefix}input_global_scale", False)):
        if name not in tree:
            continue
        value = np.asarray(tree[name], np.float32)
        if value.size != 1 or not np.isfinite(value).all() or not (value > 0).all():
            _check.fail(
                "checkpoint.activation_amax", name, "one positive number", f"{value}", "check it"
            )
        full = np.float32(2688)
        return np.float32(value.item() * full if factor else full / value.item())
    return None
