"""Qwix's provider: rules by path on models that know nothing of us.

Contract: a quantized layer has the bits of `jax_fp4.dot`, a kept one those of the plain model; the
products of two activations stay jax's; `explain` counts what ran.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import qwix
from flax import linen as nn
from flax import nnx

import jax_fp4 as fp4
from jax_fp4.integrations import LayerRules
from jax_fp4.integrations.qwix import Provider
from support.jax_reference import same_bytes

# Qwix 0.1.8 uses two names that newer releases of Flax have deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'VariableState' was removed:DeprecationWarning"),
]

THREE = ["dgrad", "fprop", "wgrad"]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def quantized_roles(function: Any, *args: Any) -> list[str]:
    return sorted(p.role for p in fp4.explain(function)(*args) if p.path == "quantized")


class Model(nn.Module):
    """Two blocks of attention and one layer, an embedding and a head."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(16, 32)(tokens)
        for n in range(2):
            x = x + nn.MultiHeadDotProductAttention(2, name=f"layers_{n}")(nn.LayerNorm()(x))
        return nn.Dense(16, name="lm_head")(nn.gelu(nn.Dense(64, name="mlp")(x)))


TOKENS = jax.random.randint(jax.random.key(5), (4, 17), 0, 16)


def loss(model: nn.Module, variables: Any) -> jax.Array:
    logits = model.apply(variables, TOKENS[:, :-1])
    assert isinstance(logits, jax.Array)
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


@pytest.fixture(scope="module")
def variables() -> Any:
    return jax.jit(Model().init)(jax.random.key(0), TOKENS[:, :-1])


def test_rules_skip_the_head_the_embedding_and_the_first_block(variables: Any) -> None:
    """Four projections of one block and the layer beside the blocks, forward and backward."""
    rules = LayerRules(fp4.recipes.NVFP4, keep_first=1)
    model = qwix.quantize_model(Model(), Provider(rules))
    assert quantized_roles(jax.grad(functools.partial(loss, model)), variables) == sorted(5 * THREE)
    everything = qwix.quantize_model(Model(), Provider(LayerRules(keep=())))
    assert len(quantized_roles(functools.partial(loss, everything), variables)) == 10
    nothing = qwix.quantize_model(Model(), Provider(LayerRules(keep=(".*",))))
    assert fp4.explain(functools.partial(loss, nothing))(variables) == ()
    same_bytes(loss(nothing, variables), loss(Model(), variables))


def test_a_model_trains_with_the_provider(variables: Any) -> None:
    """The loss falls as that of the plain model does, and gradients reach every parameter."""
    optimizer = optax.adam(3e-3)

    def train(model: nn.Module) -> list[float]:
        @jax.jit
        def step(params: Any, state: Any) -> Any:
            value, gradient = jax.value_and_grad(functools.partial(loss, model))(params)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, value

        params, state, losses = variables, optimizer.init(variables), []
        for _ in range(30):
            params, state, value = step(params, state)
            losses.append(float(value))
        return losses

    exact, ours = train(Model()), train(qwix.quantize_model(Model(), Provider()))
    assert ours[-1] < 0.5 * ours[0]
    assert ours[-1] < exact[-1] + 0.1 * exact[0]


class Layers(nn.Module):
    """One of each kind of product that Qwix intercepts."""

    @nn.compact
    def __call__(self, x: Any, sizes: Any) -> Any:
        up = self.param("up", nn.initializers.normal(), (32, 48))
        scale = self.param("scale", nn.initializers.normal(), (48,))
        experts = self.param("experts", nn.initializers.normal(), (3, 48, 20))
        y = jnp.einsum("tk,kn->tn", x, up.astype(jnp.bfloat16))
        y = jnp.einsum("tk,k->tk", y, scale.astype(jnp.bfloat16))
        scores = jnp.einsum("tn,sn->ts", y, y)
        z = jax.lax.ragged_dot(y, experts.astype(jnp.bfloat16), sizes)
        return jnp.einsum("ts,sn->tn", scores, z)


def test_weights_are_quantized_and_activations_are_not() -> None:
    """einsum with a parameter and ragged_dot are ours; scores and a norm's scale are jax's."""
    x, sizes = normal(0, (24, 32), jnp.bfloat16), jnp.array([10, 0, 14])
    recipe = fp4.recipes.NVFP4_RN
    model = qwix.quantize_model(Layers(), Provider(recipe))
    variables = model.init(jax.random.key(1), x, sizes)
    params = variables["params"]

    @jax.jit
    def expected(params: Any, x: Any) -> Any:
        up, scale, experts = (params[n].astype(jnp.bfloat16) for n in ("up", "scale", "experts"))
        y = fp4.dot(x, up, recipe=recipe) * scale
        z = fp4.ragged_dot(y, experts, sizes, recipe=recipe)
        return jnp.einsum("ts,sn->tn", jnp.einsum("tn,sn->ts", y, y), z)

    ours = jax.jit(lambda params, x: model.apply({"params": params}, x, sizes))
    same_bytes(ours(params, x), expected(params, x))
    products = fp4.explain(ours)(params, x)
    assert {(p.function, p.path) for p in products} >= {
        ("einsum", "quantized"),
        ("ragged_dot", "quantized"),
    }


def test_an_nnx_model_is_quantized_by_path() -> None:
    """Paths of NNX modules, gradients as of an explicit dot, and kernels that no block divides."""

    class Mlp(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.wi = nnx.Linear(50, 70, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(70, 8, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(self.wi(x))

    x = normal(0, (12, 50))
    recipe = fp4.recipes.NVFP4_RN
    model = qwix.quantize_model(Mlp(nnx.Rngs(0)), Provider(recipe), x)

    def ours(model: Any) -> jax.Array:
        return (model(x) ** 2).sum()

    def explicit(kernels: Any) -> jax.Array:
        return (jnp.dot(fp4.dot(x, kernels[0], recipe=recipe), kernels[1]) ** 2).sum()

    gradient = nnx.jit(nnx.grad(ours))(model)
    expected = jax.jit(jax.grad(explicit))((model.wi.kernel[...], model.head.kernel[...]))
    same_bytes([gradient.wi.kernel[...], gradient.head.kernel[...]], list(expected))


def test_other_recipes_and_other_rules_are_refused() -> None:
    """Qwix's own rules say nothing about recipes: they are not taken for layer rules."""
    with pytest.raises(TypeError, match="`rules` must be of type LayerRules, got QtRule"):
        Provider(qwix.QtRule(module_path=".*"))  # pyright: ignore[reportArgumentType]
