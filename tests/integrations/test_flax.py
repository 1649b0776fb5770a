"""Flax layers with our products: the same parameters, the same bits as `jax_fp4.dot`, training.

Contract: a layer with a hook computes what a call of `jax_fp4` with its operands computes, forward
and backward, bit for bit; a kept layer what it computes without a hook; `explain` counts the
products of a model, so that none is left out.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jax_fp4 as fp4
from jax_fp4.integrations import LayerRules
from jax_fp4.integrations import flax as fp4_flax
from support.jax_reference import same_bytes

RULES = LayerRules(fp4.recipes.NVFP4_RN)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def compare(ours: Any, expected: Any, *args: Any) -> None:
    """Values and gradients of two functions have the same bytes."""

    def both(function: Any) -> Any:
        y, back = jax.vjp(function, *args)
        return y, *back(jnp.cos(y.astype(jnp.float32)).astype(y.dtype))

    same_bytes(jax.jit(both, static_argnums=0)(ours), jax.jit(both, static_argnums=0)(expected))


def roles(function: Any, *args: Any) -> list[str]:
    """The quantized products of a function; what is not quantized is named by its path."""
    return sorted(p.role if p.path == "quantized" else p.path for p in fp4.explain(function)(*args))


# ---- Linen layers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "layer", "shape", "kernel", "numbers"),
    [
        ("float32", functools.partial(nn.Dense, 24), (5, 48), (48, 24), (((1,), (0,)), ((), ()))),
        (
            "bfloat16",
            functools.partial(nn.DenseGeneral, (3, 8)),
            (2, 7, 50),
            (50, 3, 8),
            (((2,), (0,)), ((), ())),
        ),
        (
            "bfloat16",
            functools.partial(nn.DenseGeneral, 20, axis=(-2, -1)),
            (2, 5, 3, 16),
            (3, 16, 20),
            (((2, 3), (0, 1)), ((), ())),
        ),
        (
            "bfloat16",
            functools.partial(nn.DenseGeneral, 20, axis=-1, batch_dims=(0,)),
            (2, 5, 32),
            (2, 32, 20),
            (((2,), (1,)), ((0,), (0,))),
        ),
    ],
    ids=["dense", "two features", "two contracted", "batch"],
)
def test_linen_layers_are_dot_general(
    dtype: str, layer: Any, shape: tuple[int, ...], kernel: tuple[int, ...], numbers: Any
) -> None:
    """Dense and DenseGeneral: one product of jax_fp4 in the layer's dtype, and its gradients."""
    x = normal(0, shape, jnp.dtype(dtype))
    made = functools.partial(layer, use_bias=False, dtype=dtype)
    hooked = made(dot_general_cls=fp4_flax.dot_general_cls(RULES))
    variables = hooked.init(jax.random.key(1), x)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"kernel": kernel}}
    plain = made().init(jax.random.key(1), x)
    same_bytes(variables["params"]["kernel"], plain["params"]["kernel"])

    def expected(x: Any, w: Any) -> Any:
        return fp4.dot_general(x, w.astype(dtype), numbers, recipe=fp4.recipes.NVFP4_RN)

    def ours(x: Any, w: Any) -> Any:
        return hooked.apply({"params": {"kernel": w}}, x)

    compare(ours, expected, x, variables["params"]["kernel"])


def test_linen_einsum_is_einsum() -> None:
    """Our Einsum has the parameters of Linen's, and the bits of fp4.einsum with the bias added."""
    x, equation = normal(0, (2, 6, 32)), "btk,khd->bthd"
    hooked = fp4_flax.Einsum((32, 3, 8), equation, rules=RULES)
    plain = nn.Einsum((32, 3, 8), equation)
    params = hooked.init(jax.random.key(1), x)["params"]
    same_bytes(plain.init(jax.random.key(1), x)["params"], params)
    params["bias"] = normal(2, (3, 8))

    def expected(x: Any, w: Any, b: Any) -> Any:
        return fp4.einsum(equation, x, w, recipe=fp4.recipes.NVFP4_RN) + b

    def ours(x: Any, w: Any, b: Any) -> Any:
        return hooked.apply({"params": {"kernel": w, "bias": b}}, x)

    compare(ours, expected, x, params["kernel"], params["bias"])
    kept = fp4_flax.Einsum((32, 3, 8), equation, rules=LayerRules(keep=("",)))
    same_bytes(kept.apply({"params": params}, x), plain.apply({"params": params}, x))
    with pytest.raises(ValueError, match="`einsum_str` must be of two operands"):
        fp4_flax.Einsum((32, 8), "ab,bc").init(jax.random.key(1), x)


def attention(**hooks: Any) -> nn.Module:
    return nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=32, **hooks)


def test_linen_attention_runs_its_projections_and_its_own_products() -> None:
    """Four projections by dot_general_cls, the two products of activations by einsum_cls."""
    x = normal(0, (2, 16, 32))
    dense, inner = fp4_flax.dot_general_cls(RULES), fp4_flax.einsum_cls(RULES)
    projections = {"qkv_dot_general_cls": dense, "out_dot_general_cls": dense}
    products = {"qk_attn_weights_einsum_cls": inner, "attn_weights_value_einsum_cls": inner}
    variables = attention().init(jax.random.key(1), x)

    def loss(module: nn.Module, variables: Any, x: Any) -> jax.Array:
        return (module.apply(variables, x) ** 2).mean()

    for hooks, count in ((projections, 4), (products, 2), (projections | products, 6)):
        gradient = jax.grad(functools.partial(loss, attention(**hooks)))
        assert roles(gradient, variables, x) == sorted(count * ["fprop", "dgrad", "wgrad"])
    product = functools.partial(fp4.dot_general, recipe=fp4.recipes.NVFP4_RN)
    inside = functools.partial(fp4.einsum, recipe=fp4.recipes.NVFP4_RN)
    explicit = attention(
        qkv_dot_general=product,
        out_dot_general=product,
        qk_attn_weights_einsum_cls=lambda: inside,
        attn_weights_value_einsum_cls=lambda: inside,
    )
    same_bytes(
        attention(**projections, **products).apply(variables, x), explicit.apply(variables, x)
    )


def test_linen_random_numbers_come_from_the_named_collection() -> None:
    """Stochastic rounding follows the key that `apply` is given, and differs between layers."""

    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            cls = fp4_flax.dot_general_cls(fp4.recipes.NVFP4, rng_collection="rounding")
            layer = functools.partial(nn.Dense, 32, use_bias=False, dot_general_cls=cls)
            return layer(name="a")(x), layer(name="b")(x)

    x, dy = normal(0, (32, 32)), normal(2, (32, 32))
    model = Two()
    w = normal(1, (32, 32))
    variables = {"params": {"a": {"kernel": w}, "b": {"kernel": w}}}

    def gradients(key: jax.Array) -> Any:
        _, back = jax.vjp(lambda v: model.apply(v, x, rngs={"rounding": key}), variables)
        return back((dy, dy))[0]["params"]

    first, again, other = (gradients(jax.random.key(n)) for n in (0, 0, 1))
    same_bytes(first["a"]["kernel"], again["a"]["kernel"])
    assert (first["a"]["kernel"] != other["a"]["kernel"]).any()
    assert (first["a"]["kernel"] != first["b"]["kernel"]).any()
    with pytest.raises(Exception, match="rounding"):
        model.apply(variables, x)


# ---- Linen models --------------------------------------------------------------------------------


class Block(nn.Module):
    rules: LayerRules | None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        cls = None if self.rules is None else fp4_flax.dot_general_cls(self.rules)
        y = nn.gelu(nn.Dense(64, dot_general_cls=cls, name="wi")(nn.LayerNorm()(x)))
        return x + nn.Dense(32, dot_general_cls=cls, name="wo")(y)


class LinenModel(nn.Module):
    """A language model of two blocks."""

    rules: LayerRules | None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        cls = None if self.rules is None else fp4_flax.dot_general_cls(self.rules)
        x = nn.Embed(16, 32)(tokens)
        for n in range(2):
            x = Block(self.rules, name=f"layers_{n}")(x)
        return nn.Dense(16, dot_general_cls=cls, name="lm_head")(x)


TOKENS = jax.random.randint(jax.random.key(5), (4, 17), 0, 16)


def cross_entropy(logits: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()


def linen_loss(model: nn.Module, variables: Any) -> jax.Array:
    return cross_entropy(model.apply(variables, TOKENS[:, :-1]))


def train(loss: Any, params: Any, steps: int) -> list[float]:
    """Losses of Adam on one batch."""
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


def test_a_linen_model_trains_and_quantizes_what_the_rules_say() -> None:
    """Both layers of the second block are quantized, three products each; the rest is not."""
    rules = LayerRules(fp4.recipes.NVFP4, keep_first=1)
    model = LinenModel(rules)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])
    gradient = jax.grad(functools.partial(linen_loss, model))
    assert roles(gradient, variables) == sorted(2 * ["fprop", "dgrad", "wgrad"])
    ours = train(functools.partial(linen_loss, model), variables, 30)
    exact = train(functools.partial(linen_loss, LinenModel(None)), variables, 30)
    assert ours[-1] < 0.5 * ours[0]
    assert abs(ours[0] - exact[0]) < 0.1 * exact[0]
    assert ours[-1] < exact[-1] + 0.1 * exact[0]


def test_a_linen_model_of_kept_layers_is_what_it_was() -> None:
    """Where every layer is kept, the loss has the bits of the model without hooks."""
    kept = LinenModel(LayerRules(keep=(".*",)))
    variables = jax.jit(kept.init)(jax.random.key(0), TOKENS[:, :-1])
    assert fp4.explain(functools.partial(linen_loss, kept))(variables) == ()
    same_bytes(linen_loss(kept, variables), linen_loss(LinenModel(None), variables))


def test_the_recipe_of_a_block_of_code_reaches_the_layers() -> None:
    """Rules without a recipe follow `use_recipe` where the model is called."""
    layer = nn.Dense(32, use_bias=False, dot_general_cls=fp4_flax.dot_general_cls())
    x = normal(0, (8, 32))
    variables = layer.init(jax.random.key(1), x)
    with fp4.use_recipe(fp4.recipes.MXFP8):
        (product,) = fp4.explain(layer.apply)(variables, x)
    assert product.left == "MXFP8_E4M3"


def test_linen_layers_run_in_a_scan_under_remat() -> None:
    """nn.scan over nn.remat blocks: each layer's products run once a step of the scan."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: None) -> Any:
            cls = fp4_flax.dot_general_cls(RULES)
            return x + nn.Dense(32, dot_general_cls=cls)(x), None

    policy = jax.checkpoint_policies.save_only_these_names("quantization")
    scanned = nn.scan(
        nn.remat(Layer, policy=policy, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
    )()
    x = normal(0, (8, 32))
    variables = scanned.init(jax.random.key(1), x, None)

    def loss(variables: Any) -> jax.Array:
        return (scanned.apply(variables, x, None)[0] ** 2).mean()

    plan = fp4.explain(jax.grad(loss))(variables)
    assert {p.role for p in plan} == {"fprop", "dgrad", "wgrad"}
    assert {p.times for p in plan} == {3}
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.grad(loss)(variables)))


# ---- NNX -----------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.wi = nnx.Linear(32, 64, rngs=rngs)
        self.wo = nnx.Einsum("btf,fd->btd", (64, 32), (32,), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return x + self.wo(nnx.gelu(self.wi(x)))


class NnxModel(nnx.Module):
    """A language model of two blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 32, rngs=rngs)
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def nnx_loss(graph: Any, state: Any) -> jax.Array:
    return cross_entropy(nnx.merge(graph, state)(TOKENS[:, :-1]))


def test_an_nnx_model_trains_and_quantizes_what_the_rules_say() -> None:
    """All six layers of the first block, not the head and not the last block."""
    exact_graph, state = nnx.split(NnxModel(nnx.Rngs(0)))
    rules = LayerRules(fp4.recipes.NVFP4, keep_last=1, blocks=2)
    graph, ours_state = nnx.split(fp4_flax.quantize_nnx(NnxModel(nnx.Rngs(0)), rules))
    same_bytes(jax.tree.leaves(state), jax.tree.leaves(ours_state))
    gradient = jax.grad(functools.partial(nnx_loss, graph))
    assert roles(gradient, state) == sorted(6 * ["fprop", "dgrad", "wgrad"])
    ours = train(functools.partial(nnx_loss, graph), state, 30)
    exact = train(functools.partial(nnx_loss, exact_graph), state, 30)
    assert ours[-1] < 0.5 * ours[0]
    assert ours[-1] < exact[-1] + 0.1 * exact[0]


@pytest.mark.parametrize("preferred", [None, "float32"])
def test_nnx_layers_are_dot_general_and_einsum(preferred: str | None) -> None:
    """Linear, LinearGeneral and Einsum, with the result's dtype that they ask for."""
    rngs, x = nnx.Rngs(0), normal(0, (2, 5, 48), jnp.bfloat16)
    options: dict[str, Any] = {
        "dtype": jnp.bfloat16,
        "preferred_element_type": preferred,
        "rngs": rngs,
    }
    hook = fp4_flax.NnxDotGeneral(fp4.recipes.NVFP4_RN)
    op = fp4_flax.NnxEinsum(fp4.recipes.NVFP4_RN)
    for layer, equation in (
        (nnx.Linear(48, 24, use_bias=False, dot_general=hook, **options), "btk,kn->btn"),
        (nnx.LinearGeneral((5, 48), (3, 8), axis=(1, 2), use_bias=False, dot_general=hook,
                           **options), "btk,tkhd->bhd"),
        (nnx.Einsum("btk,kn->btn", (48, 24), einsum_op=op, **options), "btk,kn->btn"),
    ):  # fmt: skip
        graph, state = nnx.split(layer)

        def expected(x: Any, w: Any, equation: str = equation) -> Any:
            return fp4.einsum(
                equation,
                x,
                w.astype(jnp.bfloat16),
                preferred_element_type=preferred,
                recipe=fp4.recipes.NVFP4_RN,
            )

        def ours(x: Any, w: Any, graph: Any = graph, state: Any = state) -> Any:
            return nnx.merge(graph, jax.tree.map(lambda _: w, state))(x)

        assert ours(x, layer.kernel[...]).dtype == jnp.dtype(preferred or "bfloat16")
        compare(ours, expected, x, layer.kernel[...])


def test_nnx_rules_can_be_changed_and_hooks_of_others_are_not_lost() -> None:
    """Kept layers get jax's product back; a product of the user's own is never replaced."""
    model = fp4_flax.quantize_nnx(NnxModel(nnx.Rngs(0)), fp4.recipes.MXFP8)
    assert model.layers[0].wi.dot_general == fp4_flax.NnxDotGeneral(fp4.recipes.MXFP8)
    fp4_flax.quantize_nnx(model, LayerRules(keep=("layers/0", "lm_head")))
    assert model.layers[0].wi.dot_general is jax.lax.dot_general
    assert model.layers[0].wo.einsum_op is jnp.einsum
    assert model.layers[1].wi.dot_general == fp4_flax.NnxDotGeneral()

    own = functools.partial(jax.lax.dot_general)
    model.layers[1].wi.dot_general = own
    with pytest.raises(ValueError, match=re.escape("got 'layers/1/wi' with dot_general=")):
        fp4_flax.quantize_nnx(model, fp4.recipes.MXFP4)
    assert model.layers[1].wo.einsum_op == fp4_flax.NnxEinsum()
    fp4_flax.quantize_nnx(model, LayerRules(keep=("layers/1/wi",)))
    assert model.layers[1].wi.dot_general is own


def test_rules_that_quantize_nothing_of_a_model_are_refused() -> None:
    """A model that stays in high precision by a misspelt rule is an error, not a slow surprise."""
    with pytest.raises(ValueError, match="rules that quantize a layer of the model"):
        fp4_flax.quantize_nnx(NnxModel(nnx.Rngs(0)), LayerRules(keep=(".*",)))


# ---- Without Flax --------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "package"), [("flax", "flax"), ("qwix", "qwix")])
def test_a_missing_package_is_named_with_its_extra(module: str, package: str) -> None:
    """The package imports nothing optional; the module that needs it says what to install."""
    program = f"""
import sys
sys.modules[{package!r}] = None
import jax_fp4, jax_fp4.integrations
assert not {{"flax", "qwix", "maxtext"}} & {{n for n, m in sys.modules.items() if m is not None}}
try:
    import jax_fp4.integrations.{module}
except ImportError as error:
    assert "pip install 'jax-fp4[{package}]'" in str(error), error
    assert error.__cause__ is not None
else:
    raise AssertionError("imported")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
