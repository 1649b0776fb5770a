"""Inference of the demo's model: how activations meet stored weights, decoding, perplexity.

A token is decoded from the cached keys and values of all earlier ones, one forward pass of one
position. With bfloat16 activations, MX formats or a static amax, that is the full forward pass: no
row of a product depends on another one. With NVFP4 and the amax of the activations at hand
("dynamic"), it is not: one token has another amax than all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.cli import training, transformer
from jax_fp4.cli.corpus import Corpus
from jax_fp4.cli.model_file import Model, ModelError, linear_names
from jax_fp4.cli.transformer import Cache, Params, Size

ACTIVATIONS = {
    "bf16": "bfloat16; weights are decoded",
    "dynamic": "in the format of the layer's weights, NVFP4 with the amax of what comes",
    "static": "the same, NVFP4 with the amax that calibration found",
    "mxfp8": "MXFP8 (E4M3), for weights in MX formats",
}


@functools.cache
def _same(format: jax_fp4.Format) -> jax_fp4.Recipe:
    operand = jax_fp4.Operand(format)
    return jax_fp4.Recipe(format.name, operand, operand)


def _decoded(w: Any) -> jax_fp4.Recipe:
    return jax_fp4.recipes.BF16


def _own_format(w: Any) -> jax_fp4.Recipe:
    """Weights that stay in bfloat16 have activations in bfloat16."""
    return _same(w.format) if isinstance(w, jax_fp4.BlockScaledArray) else jax_fp4.recipes.BF16


def _mxfp8(w: Any) -> jax_fp4.Recipe:
    quantized = isinstance(w, jax_fp4.BlockScaledArray)
    return jax_fp4.recipes.MXFP8 if quantized else jax_fp4.recipes.BF16


_RECIPES = {"bf16": _decoded, "dynamic": _own_format, "static": _own_format, "mxfp8": _mxfp8}


@dataclasses.dataclass(frozen=True)
class Runnable:
    """A model with a way to compute its linear layers.

    Attributes:
        params: as `transformer.forward` takes them.
        size: of the model.
        recipe: chosen for each weight.
    """

    params: Params
    size: Size
    recipe: Any

    @property
    def linear(self) -> transformer.Linear:
        """How linear layers are computed."""
        return transformer.Linear(self.recipe)


def runnable(model: Model, activations: str) -> Runnable:
    """``model`` with activations as one of `ACTIVATIONS`.

    Raises:
        ModelError: the weights do not go with them.
    """
    params = {**model.params, "blocks": [dict(layer) for layer in model.params["blocks"]]}
    for name, i, layer in linear_names(model.size):
        w = params["blocks"][i][layer]
        if not isinstance(w, jax_fp4.BlockScaledArray) or activations not in ("static", "mxfp8"):
            continue
        if activations == "mxfp8" and w.format.block != jax_fp4.MXFP8_E4M3.block:
            raise ModelError(
                f"activations mxfp8 go with weights in MX formats, but {name} is {w.format}, whose "
                "blocks are shorter; choose dynamic, static or bf16"
            )
        if activations == "static" and w.format.tensor_scaled:
            if name not in model.input_amax:
                raise ModelError(
                    f"activations static need {name}.input_global_scale, which this file does not "
                    "have; `calibrate` writes a model with them, for `convert`"
                )
            params["blocks"][i][layer] = jax_fp4.stored_weight(w, input_amax=model.input_amax[name])
    return Runnable(params, model.size, _RECIPES[activations])


def perplexity(model: Runnable, corpus: Corpus) -> float:
    """exp(loss in nats a byte) on held-out text; inf beyond the range of float64."""
    loss = training.validation_loss(model.params, corpus, model.size, model.recipe)
    return math.inf if loss > 700 else math.exp(loss)


@functools.partial(jax.jit, static_argnames=("size", "recipe"), donate_argnames=("caches",))
def _forward(
    params: Params, tokens: jax.Array, caches: list[Cache], start: Any, size: Size, recipe: Any
) -> tuple[jax.Array, list[Cache]]:
    linear = transformer.Linear(recipe)
    logits, caches = transformer.forward(params, tokens, size, linear, caches, start)
    return logits[:, -1], caches


@functools.partial(jax.jit, static_argnames=("top_k",))
def _sampled(logits: jax.Array, temperature: Any, key: jax.Array, top_k: int | None) -> jax.Array:
    """A token of logits [1, 256]."""
    if top_k is not None:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)[0]


def generate(
    model: Runnable,
    prompt: bytes,
    count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continues a text, one byte at a time.

    Args:
        model: what runs.
        prompt: one byte or more.
        count: bytes to make; prompt and they have to fit the model's context together.
        temperature: 0 takes the most likely byte; otherwise logits are divided by it and sampled.
        top_k: sample among so many most likely bytes; None: among all.
        seed: of sampling. The byte at a position depends on seed, position and text alone.

    Yields:
        The bytes.
    """
    tokens = jnp.asarray(np.frombuffer(prompt, np.uint8))[None]
    caches = transformer.empty_caches(model.size, 1, len(prompt) + count)
    position = 0
    for _ in range(count):
        logits, caches = _forward(model.params, tokens, caches, position, model.size, model.recipe)
        position += tokens.shape[1]
        if temperature == 0:
            token = jnp.argmax(logits[0])
        else:
            key = jax.random.fold_in(jax.random.key(seed), position)
            token = _sampled(logits, temperature, key, top_k)
        tokens = token.reshape(1, 1)
        yield int(token)
