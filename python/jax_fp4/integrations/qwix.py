"""Qwix: a provider that runs the products of any Flax model in FP4, chosen by layer rules.

Qwix replaces jax's products while a model is called and asks a provider for each of them. The model
needs no change, and its parameters stay what they are.

    dot_general   quantized in every layer that the rules do not keep; with batch dimensions only
                  if an operand is a parameter, since attention's products are not of weights
    einsum        quantized where an operand is a parameter
    ragged_dot    quantized in every layer that the rules do not keep
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _check
from jax_fp4.dot import dot_general
from jax_fp4.einsum import einsum
from jax_fp4.integrations.layer_rules import LayerRules, as_rules
from jax_fp4.ragged import ragged_dot
from jax_fp4.recipe import Recipe

try:
    import qwix
    from qwix._src.utils import flax_util  # which module is running, and what its parameters are
except ImportError as error:
    _check.missing_extra("integrations.qwix", "qwix", "qwix", error)


class Provider(qwix.QuantizationProvider):
    """A provider for ``qwix.quantize_model``.

    ``qwix.quantize_model(model, Provider())`` for Linen, with example inputs for NNX.

    Args:
        rules: a `LayerRules`; or a recipe for every layer that is not in `KEEP`. Paths are those
            that Qwix's own rules match.
    """

    def __init__(self, rules: LayerRules | Recipe | None = None) -> None:
        super().__init__([])
        self.rules = as_rules("integrations.qwix.Provider", rules)

    def get_intercept_map(self) -> Any:
        """What Qwix replaces, by name."""
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
            "jax.lax.ragged_dot": self.ragged_dot,
        }

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **keywords: Any
    ) -> jax.Array:
        """`jax_fp4.dot_general`, or jax's where the layer is kept.

        Args:
            lhs: see `jax_fp4.dot_general`.
            rhs: see there.
            dimension_numbers: see there.
            *args: see there.
            **keywords: see there.

        Returns:
            The product.
        """
        batch = bool(dimension_numbers[1][0])
        if not self.quantizes() or (batch and not _has_parameter(lhs, rhs)):
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, *args, **keywords)
        return dot_general(lhs, rhs, dimension_numbers, *args, recipe=self.rules.recipe, **keywords)

    def einsum(self, subscripts: Any, *operands: Any, **keywords: Any) -> jax.Array:
        """`jax_fp4.einsum`, or jax's where the layer is kept.

        Args:
            subscripts: see `jax_fp4.einsum`.
            *operands: see there.
            **keywords: see there.

        Returns:
            What einsum returns.
        """
        if not self.quantizes() or not _has_parameter(*operands):
            return jnp.einsum(subscripts, *operands, **keywords)
        keywords.pop("_dot_general", None)  # jax's own hook, which ours takes the place of
        return einsum(subscripts, *operands, recipe=self.rules.recipe, **keywords)

    def ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *args: Any, **keywords: Any
    ) -> jax.Array:
        """`jax_fp4.ragged_dot`, or jax's where the layer is kept.

        Args:
            lhs: see `jax_fp4.ragged_dot`.
            rhs: see there.
            group_sizes: see there.
            *args: see there.
            **keywords: see there.

        Returns:
            The products.
        """
        if not self.quantizes():
            return jax.lax.ragged_dot(lhs, rhs, group_sizes, *args, **keywords)
        return ragged_dot(lhs, rhs, group_sizes, *args, recipe=self.rules.recipe, **keywords)

    def quantizes(self) -> bool:
        """Whether the rules quantize the module that is running.

        Returns:
            False if it is kept.
        """
        return self.rules.quantizes("/".join(map(str, flax_util.get_current_module_path())))


def _has_parameter(*operands: Any) -> bool:
    """Whether an operand is a parameter of the module that is running, also after a cast."""
    return any(hasattr(x, "shape") and flax_util.find_param(x) is not None for x in operands)
