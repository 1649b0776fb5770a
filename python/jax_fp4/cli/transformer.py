"""The demo's model: a byte-level transformer language model in plain JAX.

Pre-norm blocks (RMSNorm, causal attention with rotary positions, MLP with GELU) and a head tied to
the embedding. What the recipe governs are the linear layers inside the blocks; embedding, attention
and head stay in bfloat16 or float32, as in published NVFP4 pretraining (arXiv 2509.25149).

    tokens [B, T] -> embedding [256, D] -> L blocks
        x += out(attention(qkv(norm(x))))      qkv [D, 3 D], out [D, D]
        x += down(gelu(up(norm(x))))           up [D, F], down [F, D]
    -> norm -> embedding transposed -> logits [B, T, 256]

Weights and the residual stream x are float32; what goes into a linear layer and what comes out is
bfloat16, under every recipe. The blocks are a Python loop: on a CPU, XLA compiles and runs these
few layers faster so than under lax.scan, which copies what each iteration saves.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp4

VOCABULARY = 256  # bytes
_ROTARY_BASE = 10000.0
_NORM_EPSILON = 1e-6
# Of every initial weight, as in GPT-2. With 1 / sqrt(fan-in), larger at these widths, the gaps
# to bf16 were 2.6 % (NVFP4) and 2.2 % (NVFP4_RN) instead of 0.8 % and 0.4 % after 500 steps of the
# tiny size, at almost the same bf16 loss.
_INITIAL_STD = 0.02

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """A model's dimensions, and the batch and learning rate that go with them.

    Attributes:
        width: D.
        layers: L.
        hidden: F, width of the MLP.
        heads: of attention; D / heads is even.
        context: T, tokens a sequence.
        batch: B, sequences a step.
        learning_rate: the peak.
    """

    width: int
    layers: int
    hidden: int
    heads: int
    context: int
    batch: int
    learning_rate: float

    @property
    def tokens_per_step(self) -> int:
        """B T."""
        return self.batch * self.context


SIZES: dict[str, Size] = {
    "tiny": Size(128, 3, 512, 4, context=128, batch=8, learning_rate=1e-3),  # 0.6 M parameters
    "small": Size(256, 6, 1024, 8, context=256, batch=8, learning_rate=1e-3),  # 4.8 M
    "medium": Size(512, 8, 2048, 8, context=256, batch=16, learning_rate=6e-4),  # 25 M
}


def initial_params(size: Size, seed: int) -> Params:
    """The weights that every recipe starts from, float32."""
    d, f = size.width, size.hidden
    keys = iter(jax.random.split(jax.random.key(seed), 1 + 4 * size.layers))

    def normal(shape: tuple[int, ...], std: float) -> jax.Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    # The two layers that add to the residual stream start smaller, so that its variance does not
    # grow with depth (GPT-2's rule).
    residual = (2 * size.layers) ** -0.5

    def block_params() -> Params:
        return {
            "attention_norm": jnp.ones(d),
            "qkv": normal((d, 3 * d), _INITIAL_STD),
            "out": normal((d, d), residual * _INITIAL_STD),
            "mlp_norm": jnp.ones(d),
            "up": normal((d, f), _INITIAL_STD),
            "down": normal((f, d), residual * _INITIAL_STD),
        }

    return {
        "embedding": normal((VOCABULARY, d), _INITIAL_STD),
        "blocks": [block_params() for _ in range(size.layers)],
        "norm": jnp.ones(d),
    }


def parameter_count(params: Params) -> int:
    """Number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _NORM_EPSILON) * gain


def _linear(x: jax.Array, w: jax.Array, recipe: jax_fp4.Recipe) -> jax.Array:
    """x [B, T, K] w [K, N], the layer that recipes govern: bfloat16 in and out."""
    x = x.astype(jnp.bfloat16)
    return jax_fp4.dot(x, w, preferred_element_type=jnp.bfloat16, recipe=recipe)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [B, T, heads, width]."""
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies  # [T, 1, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal attention, in float32: qkv [B, T, 3 D] -> [B, T, D]."""
    batch, length, width = qkv.shape
    q, k, v = jnp.moveaxis(
        qkv.astype(jnp.float32).reshape(batch, length, 3, heads, width // (3 * heads)), 2, 0
    )
    q, k = _rotate(q), _rotate(k)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width // 3)


def block(params: Params, x: jax.Array, size: Size, recipe: jax_fp4.Recipe) -> jax.Array:
    """One block: x float32 [B, T, D]."""
    qkv = _linear(_rms_norm(x, params["attention_norm"]), params["qkv"], recipe)
    x = x + _linear(_attention(qkv, size.heads), params["out"], recipe)
    hidden = jax.nn.gelu(_linear(_rms_norm(x, params["mlp_norm"]), params["up"], recipe))
    return x + _linear(hidden, params["down"], recipe)


def loss(params: Params, tokens: jax.Array, size: Size, recipe: jax_fp4.Recipe) -> jax.Array:
    """Mean cross-entropy, in nats a byte, of each next byte: tokens uint8 [B, T + 1]."""
    inputs, targets = tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)
    x = params["embedding"][inputs]
    for layer in params["blocks"]:
        x = block(layer, x, size, recipe)
    logits = _rms_norm(x, params["norm"]) @ params["embedding"].T
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
