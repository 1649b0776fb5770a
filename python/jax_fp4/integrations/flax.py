"""Flax: what Linen and NNX layers take as `dot_general`, `dot_general_cls`, `einsum_op`.

    Linen  DotGeneral  for nn.Dense, nn.DenseGeneral, nn.MultiHeadDotProductAttention
           EinsumOp    for the two products inside of attention
           Einsum      stands for nn.Einsum, which takes no hook
    NNX    quantize_nnx sets the hooks of a whole model; NnxDotGeneral and NnxEinsum are those hooks

None of them owns variables: parameters, their names and their initial values stay the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_fp4 import _check
from jax_fp4.dot import dot_general
from jax_fp4.einsum import einsum
from jax_fp4.integrations.layer_rules import LayerRules, as_rules
from jax_fp4.recipe import Recipe

try:
    from flax import linen as nn
    from flax import nnx
except ImportError as error:
    _check.missing_extra("integrations.flax", "flax", "flax", error)

Model = TypeVar("Model", bound=nnx.Module)


# ---- Linen ---------------------------------------------------------------------------------------


class _Hook(nn.Module):
    """A module in a layer, for its path and its random numbers."""

    rules: LayerRules = LayerRules()
    rng_collection: str | None = None

    def _keywords(self) -> dict[str, Any] | None:
        """What the product takes beyond jax's arguments, None where the layer is kept."""
        if not self.rules.quantizes("/".join(self.path[:-1])):
            return None
        key = None if self.rng_collection is None else self.make_rng(self.rng_collection)
        return {"recipe": self.rules.recipe, "key": key}


class DotGeneral(_Hook):
    """The product of a Linen layer; `dot_general_cls` makes it.

    Attributes:
        rules: which layers are quantized, asked with the path of the layer that the hook is in.
        rng_collection: the random numbers of Flax that stochastic rounding draws from; by default
            its seed is made from the cotangent's bits.
    """

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`jax_fp4.dot_general`, or jax's where the layer is kept.

        Args:
            lhs: see `jax_fp4.dot_general`.
            rhs: see there.
            dimension_numbers: see there.
            precision: see there.
            preferred_element_type: see there.
            out_sharding: see there.

        Returns:
            The product.
        """
        keywords = self._keywords()
        function: Any = jax.lax.dot_general if keywords is None else dot_general
        return function(
            lhs,
            rhs,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            **(keywords or {}),
        )


class EinsumOp(_Hook):
    """The einsum of a Linen layer; `einsum_cls` makes it.

    Attributes:
        rules: see `DotGeneral`.
        rng_collection: see `DotGeneral`.
    """

    @nn.compact
    def __call__(self, subscripts: str, *operands: Any, **keywords: Any) -> jax.Array:
        """`jax_fp4.einsum`, or jax's where the layer is kept.

        Args:
            subscripts: see `jax_fp4.einsum`.
            *operands: see there.
            **keywords: see there.

        Returns:
            What einsum returns.
        """
        more = self._keywords()
        function: Any = jnp.einsum if more is None else einsum
        return function(subscripts, *operands, **keywords, **(more or {}))


def dot_general_cls(
    rules: LayerRules | Recipe | None = None, *, rng_collection: str | None = None
) -> Callable[[], DotGeneral]:
    """The ``dot_general_cls`` of Linen's Dense and DenseGeneral, and of its attention modules.

    ``nn.Dense(256, dot_general_cls=dot_general_cls())``; attention takes it as
    ``qkv_dot_general_cls`` and ``out_dot_general_cls``.

    Args:
        rules: a `LayerRules`; or a recipe for every layer that is not in `KEEP`.
        rng_collection: see `DotGeneral`; ``apply(..., rngs={rng_collection: key})`` brings it.

    Returns:
        A callable without arguments that makes a `DotGeneral`.
    """
    return functools.partial(DotGeneral, as_rules("dot_general_cls", rules), rng_collection)


def einsum_cls(
    rules: LayerRules | Recipe | None = None, *, rng_collection: str | None = None
) -> Callable[[], EinsumOp]:
    """The ``qk_attn_weights_einsum_cls`` and ``attn_weights_value_einsum_cls`` of Linen.

    Both are products of two activations, which the published recipe leaves in bfloat16. Flax takes
    the two together or none.

    Args:
        rules: see `dot_general_cls`.
        rng_collection: see `dot_general_cls`.

    Returns:
        A callable without arguments that makes an `EinsumOp`.
    """
    return functools.partial(EinsumOp, as_rules("einsum_cls", rules), rng_collection)


class Einsum(nn.Einsum):
    """`flax.linen.Einsum` with a quantized product; the same parameters.

    Attributes:
        rules: see `DotGeneral`.
        rng_collection: see `DotGeneral`.
    """

    rules: LayerRules = LayerRules()
    rng_collection: str | None = None

    @nn.compact
    def __call__(self, inputs: Any, einsum_str: str | None = None) -> Any:
        """The einsum of the inputs and the kernel, and the bias.

        Args:
            inputs: the left operand.
            einsum_str: the equation, explicit and of two operands; here or as an attribute.

        Returns:
            The result.

        Raises:
            ValueError: the equation is another one.
        """
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation or equation.count(",") != 1:
            _check.fail(
                "integrations.flax.Einsum",
                "einsum_str",
                'of two operands, with "->"',
                repr(equation),
                'write for example "btk,kn->btn"',
            )
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, spread = None, []
        if self.use_bias:
            shape, spread = self._get_bias_shape(equation, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        y = EinsumOp(self.rules, self.rng_collection)(
            equation,
            inputs,
            kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )
        return y if bias is None else y + jnp.reshape(bias, spread)


# ---- NNX -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NnxDotGeneral:
    """The ``dot_general`` of nnx.Linear and nnx.LinearGeneral.

    Equal recipes make equal hooks, so that equal models share their compiled functions.

    Attributes:
        recipe: see `jax_fp4.dot_general`.
    """

    recipe: Recipe | None = None

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """`jax_fp4.dot_general`.

        Args:
            lhs: see `jax_fp4.dot_general`.
            rhs: see there.
            dimension_numbers: see there.
            precision: see there.
            preferred_element_type: see there.
            out_sharding: see there.

        Returns:
            The product.
        """
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            recipe=self.recipe,
        )


@dataclasses.dataclass(frozen=True)
class NnxEinsum:
    """The ``einsum_op`` of nnx.Einsum.

    Attributes:
        recipe: see `jax_fp4.einsum`.
    """

    recipe: Recipe | None = None

    def __call__(self, subscripts: str, *operands: Any, **keywords: Any) -> jax.Array:
        """`jax_fp4.einsum`.

        Args:
            subscripts: see there.
            *operands: see there.
            **keywords: see there.

        Returns:
            What einsum returns.
        """
        return einsum(subscripts, *operands, recipe=self.recipe, **keywords)


def quantize_nnx(model: Model, rules: LayerRules | Recipe | None = None) -> Model:
    """Gives the layers of an NNX model their hooks, in place.

    nnx.Linear, nnx.LinearGeneral and nnx.Einsum, also those inside of nnx.MultiHeadAttention. Their
    paths are those of ``nnx.iter_modules(model)``, joined by "/". Layers that the rules keep get
    jax's product back, so that other rules may follow.

    Args:
        model: an nnx.Module.
        rules: a `LayerRules`; or a recipe for every layer that is not in `KEEP`.

    Returns:
        ``model``.

    Raises:
        ValueError: the rules quantize no layer of the model; or a layer has a product of its own.
            The model is as it was.
    """
    where = "integrations.flax.quantize_nnx"
    rules = as_rules(where, rules)
    changes: list[tuple[Any, str, Any]] = []
    quantized = False
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Einsum):
            name, stock, hook = "einsum_op", jnp.einsum, NnxEinsum(rules.recipe)
        elif isinstance(module, (nnx.Linear, nnx.LinearGeneral)):
            name, stock, hook = "dot_general", jax.lax.dot_general, NnxDotGeneral(rules.recipe)
        else:
            continue
        layer = "/".join(map(str, path))
        present = getattr(module, name)
        own = present is not None and present is not stock and not isinstance(present, type(hook))
        own = own or getattr(module, "dot_general_cls", None) is not None
        chosen = rules.quantizes(layer)
        if own and not chosen:
            continue
        if own:
            _check.fail(
                where,
                "model",
                "of layers whose product is jax's, or ours",
                f"{layer!r} with {name}={present!r}",
                "keep the layer by a rule, or make it without a product of its own",
            )
        quantized |= chosen
        changes.append((module, name, hook if chosen else stock))
    if not quantized:
        _check.fail(
            where,
            "rules",
            "rules that quantize a layer of the model",
            f"{rules} for {len(changes)} layers",
            "print the paths of nnx.iter_modules(model)",
        )
    for module, name, product in changes:
        setattr(module, name, product)
    return model
