"""MaxText: its `Quantization`, and one call after which its configuration can choose it.

    python -m jax_fp4.integrations.maxtext config.yml quantization=fp4 quant_cfg_path=NVFP4_RN

runs MaxText's training after that call, `use`. The configuration then means

    quantization=fp4            dense layers and experts by `Quantization`
    use_qwix_quantization=true  the same and jax.lax.ragged_dot, by the provider of
                                `jax_fp4.integrations.qwix`, with rules on the paths of modules
    quant_cfg_path              the name of a recipe

MaxText is not edited: it looks these functions up in their module whenever it makes a model.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_fp4 import _check
from jax_fp4.einsum import einsum
from jax_fp4.integrations.layer_rules import KEEP, LayerRules, as_rules
from jax_fp4.ragged import ragged_dot
from jax_fp4.recipe import RECIPES, Recipe

try:
    from maxtext.kernels import megablox  # pyright: ignore[reportMissingImports]
    from maxtext.layers import quantizations  # pyright: ignore[reportMissingImports]
except ImportError as error:
    _check.missing_extra("integrations.maxtext", "maxtext", "maxtext", error)

from jax_fp4.integrations import flax as fp4_flax
from jax_fp4.integrations import qwix as fp4_qwix

_WHERE = "integrations.maxtext"
_STOCK_CONFIGURE = quantizations.configure_quantization
_STOCK_PROVIDER = quantizations.get_qt_provider
_STOCK_GMM = megablox.gmm


@dataclasses.dataclass(unsafe_hash=True)  # frozen is not possible: MaxText's class is not
class Quantization(quantizations.Quantization):
    """What MaxText's layers ask for their products.

    Attributes:
        recipe: see `jax_fp4.dot_general`.
        keep_router: whether the gate of a mixture of experts keeps jax's product.
    """

    recipe: Recipe | None = None
    keep_router: bool = True

    needs_apply_rngs: ClassVar[bool] = False  # the seed of stochastic rounding needs no state
    quant_mode: ClassVar[str] = "train"

    def dot_general_cls(self, mesh_axes: tuple[str | None, ...] = ()) -> Any:
        """The module of a dense layer, of attention's projections, or of a router.

        Args:
            mesh_axes: logical names of the kernel's axes; only a router's last one has none.

        Returns:
            A callable without arguments that makes a Linen module.
        """
        router = len(mesh_axes) > 0 and mesh_axes[-1] is None
        keep = (".*",) if router and self.keep_router else ()
        return fp4_flax.dot_general_cls(LayerRules(self.recipe, keep=keep))

    def einsum(self, dtype: Any = jnp.float32, mesh_axes: tuple[str | None, ...] = ()) -> Any:
        """The einsum of experts; of the masks that bring tokens to them and back, jax's.

        Args:
            dtype: without effect, a name of MaxText's.
            mesh_axes: logical names of the second operand's axes.

        Returns:
            A function like jnp.einsum.
        """
        if any(axis is not None and axis.startswith("activation") for axis in mesh_axes):
            return (
                jnp.einsum
            )  # ones and zeros select tokens: quantizing would round them for nothing
        return functools.partial(einsum, recipe=self.recipe)

    @property
    def quantize_dtype(self) -> Quantization:
        """What MaxText hands to `megablox.gmm` as the dtype of both operands: this object.

        Returns:
            itself, by which `use` knows whose product it is.
        """
        return self


def use(rules: LayerRules | Recipe | None = None) -> None:
    """Makes ``quantization=fp4`` of MaxText's configuration mean `jax_fp4`, in this process.

    All other values of ``quantization`` mean what they did. Called again, the last rules hold.

    Args:
        rules: a `LayerRules`; or a recipe for every layer that is not in `KEEP`. A recipe that the
            configuration names by ``quant_cfg_path`` takes the place of theirs. Rules other than
            `KEEP` are about paths, which MaxText's own layers do not know: they need
            ``use_qwix_quantization=true``.
    """
    rules = as_rules(f"{_WHERE}.use", rules)

    @functools.wraps(_STOCK_CONFIGURE)
    def configure_quantization(config: Any, quant_mode_str: str = "train") -> Any:
        if config.quantization != "fp4" or config.use_qwix_quantization:
            return _STOCK_CONFIGURE(config, quant_mode_str)
        return _quantization(config, rules)

    @functools.wraps(_STOCK_PROVIDER)
    def get_qt_provider(config: Any) -> Any:
        if config.quantization != "fp4":
            return _STOCK_PROVIDER(config)
        return Provider(dataclasses.replace(rules, recipe=_recipe(config, rules)))

    quantizations.configure_quantization = configure_quantization
    quantizations.get_qt_provider = get_qt_provider
    megablox.gmm = _gmm


def _recipe(config: Any, rules: LayerRules) -> Recipe | None:
    """The recipe that the configuration names, or else that of the rules."""
    if not config.quant_cfg_path:
        return rules.recipe
    _check.one_of(_WHERE, "quant_cfg_path", config.quant_cfg_path, RECIPES)
    return RECIPES[config.quant_cfg_path]


def _quantization(config: Any, rules: LayerRules) -> Quantization:
    """The object for a configuration that it is enough for."""
    way_out = "set use_qwix_quantization=true"
    if rules != LayerRules(rules.recipe, keep=rules.keep) or rules.keep not in ((), KEEP):
        _check.fail(
            _WHERE,
            "rules",
            "LayerRules with the default `keep` and no blocks, without use_qwix_quantization",
            repr(rules),
            f"{way_out}, whose provider knows the paths of modules",
        )
    ragged = not (config.megablox or config.use_tokamax_gmm)
    if config.num_experts > 1 and config.sparse_matmul and ragged:
        _check.fail(
            _WHERE,
            "megablox",
            "true for sparse experts without use_qwix_quantization",
            "false",
            f"{way_out}, or megablox=true, or sparse_matmul=false",
        )
    return Quantization(_recipe(config, rules), keep_router=bool(rules.keep))


class Provider(fp4_qwix.Provider):
    """The provider of `jax_fp4.integrations.qwix`, for MaxText's grouped product as well."""

    def get_intercept_map(self) -> Any:
        """What Qwix replaces, by name."""
        return super().get_intercept_map() | {"maxtext.kernels.megablox.gmm": self.gmm}

    def gmm(self, lhs: Any, rhs: Any, group_sizes: Any, **keywords: Any) -> jax.Array:
        """`jax_fp4.ragged_dot`, or MaxText's grouped product where the layer is kept.

        Args:
            lhs: see `jax_fp4.ragged_dot`.
            rhs: see there.
            group_sizes: see there.
            **keywords: MaxText's.

        Returns:
            The products.
        """
        if not self.quantizes():
            return _STOCK_GMM(lhs, rhs, group_sizes, **keywords)
        return _ragged_dot(self.rules.recipe, lhs, rhs, group_sizes, **keywords)


@functools.wraps(_STOCK_GMM)
def _gmm(lhs: Any, rhs: Any, group_sizes: Any, *args: Any, **keywords: Any) -> jax.Array:
    """In the place of `megablox.gmm`: ours for layers with our `Quantization`."""
    quantization = keywords.get("lhs_quantize_dtype")
    if not isinstance(quantization, Quantization):
        return _STOCK_GMM(lhs, rhs, group_sizes, *args, **keywords)
    return _ragged_dot(quantization.recipe, lhs, rhs, group_sizes, *args, **keywords)


def _ragged_dot(
    recipe: Recipe | None,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    preferred_element_type: Any = None,
    *,
    group_offset: Any = None,
    partial_sum: Any = None,
    **_: Any,
) -> jax.Array:
    """The grouped product from MaxText's arguments; the others choose tiles and kernels."""
    if not (group_offset is None or (isinstance(group_offset, int) and group_offset == 0)):
        _check.fail(
            _WHERE,
            "group_offset",
            "0",
            repr(group_offset),
            "use another kind of expert parallelism, or keep the experts by a rule",
        )
    y = ragged_dot(
        lhs, rhs, group_sizes, preferred_element_type=preferred_element_type, recipe=recipe
    )
    return y if partial_sum is None else y + partial_sum.astype(y.dtype)


if __name__ == "__main__":
    from absl import app
    from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

    # Under its name, so that Quantization is one class, and not that of __main__ beside it.
    from jax_fp4.integrations import maxtext

    maxtext.use()
    app.run(train.main)
