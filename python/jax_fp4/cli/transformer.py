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

For inference, linear weights may be quantized ones (`jax_fp4.stored_weight`), and a `Cache` of each
block keeps the keys and values of earlier tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

LINEAR = ("qkv", "out", "up", "down")
"""The linear layers of a block, in the order in which it calls them."""

Params = dict[str, Any]
Layer = Callable[[jax.Array, Any], jax.Array]
"""(x [B, T, K], weight [K, N]) -> [B, T, N]: how linear layers are computed."""


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
    "micro": Size(64, 2, 256, 2, context=128, batch=4, learning_rate=2e-3),  # 0.1 M parameters
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


@dataclasses.dataclass(frozen=True)
class Linear:
    """The layer that recipes govern: bfloat16 in and out.

    Attributes:
        recipe: of all weights, or a function that chooses it for a weight.
    """

    recipe: jax_fp4.Recipe | Callable[[Any], jax_fp4.Recipe]

    def __call__(self, x: jax.Array, w: Any) -> jax.Array:
        """X [B, T, K] times w [K, N]."""
        recipe = self.recipe if isinstance(self.recipe, jax_fp4.Recipe) else self.recipe(w)
        x = x.astype(jnp.bfloat16)
        return jax_fp4.dot(x, w, preferred_element_type=jnp.bfloat16, recipe=recipe)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Rotated keys, and values, of one block: float32 [B, positions, heads, width]."""

    keys: jax.Array
    values: jax.Array


def empty_caches(size: Size, batch: int, positions: int) -> list[Cache]:
    """A cache for each block."""
    shape = (batch, positions, size.heads, size.width // size.heads)
    return [Cache(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(size.layers)]


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of x [B, T, heads, width]."""
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = positions[:, None, None] * frequencies  # [T, 1, half]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(
    qkv: jax.Array, heads: int, cache: Cache | None, start: Any
) -> tuple[jax.Array, Cache]:
    """Causal attention, in float32: qkv [B, T, 3 D] -> [B, T, D]; the cache with these T tokens."""
    batch, length, width = qkv.shape
    q, k, v = jnp.moveaxis(
        qkv.astype(jnp.float32).reshape(batch, length, 3, heads, width // (3 * heads)), 2, 0
    )
    positions = start + jnp.arange(length)
    q, k = _rotate(q, positions), _rotate(k, positions)
    if cache is not None:
        at = (0, start, 0, 0)
        k = jax.lax.dynamic_update_slice(cache.keys, k, at)
        v = jax.lax.dynamic_update_slice(cache.values, v, at)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = positions[:, None] >= jnp.arange(k.shape[1])
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width // 3)
    return mixed, Cache(k, v)


def block(
    params: Params,
    x: jax.Array,
    size: Size,
    linear: Layer,
    cache: Cache | None = None,
    start: Any = 0,
) -> tuple[jax.Array, Cache]:
    """One block: x float32 [B, T, D] at positions ``start`` and following."""
    qkv = linear(_rms_norm(x, params["attention_norm"]), params["qkv"])
    mixed, cache = _attention(qkv, size.heads, cache, start)
    x = x + linear(mixed, params["out"])
    hidden = jax.nn.gelu(linear(_rms_norm(x, params["mlp_norm"]), params["up"]))
    return x + linear(hidden, params["down"]), cache


def forward(
    params: Params,
    tokens: jax.Array,
    size: Size,
    linear: Layer,
    caches: Sequence[Cache] | None = None,
    start: Any = 0,
) -> tuple[jax.Array, list[Cache]]:
    """Logits float32 [B, T, 256] of what follows each token.

    Args:
        params: the weights.
        tokens: integers [B, T].
        size: of the model.
        linear: how linear layers are computed.
        caches: of each block, with everything before ``start``; None: there is nothing.
        start: position of the first token.

    Returns:
        (logits, caches with these tokens).
    """
    x = params["embedding"][tokens.astype(jnp.int32)]
    updated = []
    for i, layer in enumerate(params["blocks"]):
        cache = None if caches is None else caches[i]
        x, cache = block(layer, x, size, linear, cache, start)
        updated.append(cache)
    return _rms_norm(x, params["norm"]) @ params["embedding"].T, updated


def loss(
    params: Params,
    tokens: jax.Array,
    size: Size,
    recipe: jax_fp4.Recipe | Callable[[Any], jax_fp4.Recipe],
) -> jax.Array:
    """Mean cross-entropy, in nats a byte, of each next byte: tokens uint8 [B, T + 1]."""
    targets = tokens[:, 1:].astype(jnp.int32)
    logits, _ = forward(params, tokens[:, :-1], size, Linear(recipe))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
