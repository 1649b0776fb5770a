"""Recipes: how the six operands of the three products of a linear layer are quantized.

    fprop:  y[M, N]  = x[M, K] . w[N, K]^T     contracts K
    dgrad:  dx[M, K] = dy[M, N] . w[K, N]^T    contracts N
    wgrad:  dw[N, K] = dy[N, M] . x[K, M]^T    contracts M

A recipe is data. It is passed explicitly (``recipe=``) or set for a block of code (`use_recipe`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from jax_fp4 import _check
from jax_fp4.copies import DEFAULT_SIGNS
from jax_fp4.formats import (
    FP8_E4M3,
    FP8_E5M2,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    NVFP4,
    Format,
)


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of a product is quantized; the options of `jax_fp4.quantize`.

    Attributes:
        format: the block format.
        scaling: "1d", or "2d" for one scale per block x block tile.
        rounding: "nearest" or "stochastic".
        hadamard: False, True (default signs), or a tuple of 16 signs.
        scale_rule: "rceil" or "floor" (MX formats).
        four_over_six: NVFP4 rounded to nearest only.
    """

    format: Format
    scaling: str = "1d"
    rounding: str = "nearest"
    hadamard: bool | tuple[int, ...] = False
    scale_rule: str = "rceil"
    four_over_six: bool = False

    def __post_init__(self) -> None:
        """Checks the options and makes the signs hashable."""
        where = "Operand"
        _check.instance(where, "format", self.format, Format, "jax_fp4.NVFP4")
        signs = self.signs
        if not isinstance(self.hadamard, bool):
            object.__setattr__(self, "hadamard", tuple(int(sign) for sign in self.hadamard))
        _check.copy_options(
            where,
            self.format,
            scaling=self.scaling,
            rounding=self.rounding,
            rotated=signs is not None,
            scale_rule=self.scale_rule,
            four_over_six=self.four_over_six,
        )

    @property
    def signs(self) -> int | None:
        """The Hadamard signs as a bit mask, None without the transform."""
        return _check.signs("Operand", "hadamard", self.hadamard, DEFAULT_SIGNS)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The operands of fprop, dgrad and wgrad. An operand that is None is taken as bfloat16.

    Attributes:
        name: what tables and errors call it.
        fprop_x: x [M, K] along K.
        fprop_w: w along K.
        dgrad_dy: dy [M, N] along N.
        dgrad_w: w along N.
        wgrad_dy: dy along M.
        wgrad_x: x along M.
        weight: which operand of a dot is w, "rhs", "lhs", or "auto": the right one, unless there
            are batch dimensions; then neither is, and both are scaled in one dimension.
        min_contraction: products that sum fewer terms than this for an element of the result are
            left to jax, gradients included. With 2, the default, outer products are: nothing is
            summed there, so nothing is gained.
    """

    name: str
    fprop_x: Operand | None = None
    fprop_w: Operand | None = None
    dgrad_dy: Operand | None = None
    dgrad_w: Operand | None = None
    wgrad_dy: Operand | None = None
    wgrad_x: Operand | None = None
    weight: str = "auto"
    min_contraction: int = 2

    def __post_init__(self) -> None:
        """Checks that the two operands of each product go together."""
        _check.instance("Recipe", "name", self.name, str, '"my recipe"')
        where = f"Recipe {self.name!r}"
        _check.one_of(where, "weight", self.weight, ("auto", "rhs", "lhs"))
        _check.instance(where, "min_contraction", self.min_contraction, int, "2")
        for product in ("fprop_x fprop_w", "dgrad_dy dgrad_w", "wgrad_dy wgrad_x"):
            first_name, second_name = product.split()
            first, second = getattr(self, first_name), getattr(self, second_name)
            for name, operand in ((first_name, first), (second_name, second)):
                if operand is not None:
                    _check.instance(
                        where, name, operand, Operand, "Operand(jax_fp4.NVFP4), or None"
                    )
            if (first is None) != (second is None):
                _check.fail(
                    where,
                    second_name,
                    f"quantized exactly if {first_name} is",
                    f"{second} beside {first}",
                    "a product is quantized on both sides or on none",
                )
            if first is None or second is None:
                continue
            if first.format.block != second.format.block:
                _check.fail(
                    where,
                    f"{second_name}.format",
                    f"a format with blocks of {first.format.block}, as {first_name}",
                    str(second.format),
                    "NVFP4 goes with NVFP4, MX and FP8 formats with one another",
                )
            if first.signs != second.signs:
                _check.fail(
                    where,
                    f"{second_name}.hadamard",
                    f"{first.hadamard}, as {first_name}: a rotation cancels only on both operands",
                    str(second.hadamard),
                    "rotate both or none",
                )

    @property
    def quantized(self) -> bool:
        """Whether any product is quantized."""
        return any(
            isinstance(getattr(self, field.name), Operand) for field in dataclasses.fields(self)
        )


def _uniform(name: str, forward: Operand | None, gradient: Operand | None) -> Recipe:
    return Recipe(name, forward, forward, gradient, forward, gradient, forward)


_nearest = Operand(NVFP4)
_weight = Operand(NVFP4, scaling="2d")
_rotated = Operand(NVFP4, hadamard=True)
_gradient = Operand(NVFP4, rounding="stochastic")
_rotated_gradient = Operand(NVFP4, rounding="stochastic", hadamard=True)


class recipes:
    """The named recipes.

    Attributes:
        NVFP4: the published NVFP4 pretraining recipe (arXiv 2509.25149): 16x16 scales for weights,
            stochastic rounding of gradients, the random Hadamard transform on both operands of the
            weight gradient.
        NVFP4_RN: NVFP4, everything rounded to nearest in 1x16 blocks.
        MXFP4: rounded to nearest, scales rounded up.
        MXFP6: E2M3 forward and E3M2 gradients.
        MXFP8: E4M3 everywhere.
        FP8: E4M3 forward and E5M2 gradients, one scale a tensor taken from its current amax.
        BF16: all products in bfloat16 with f32 sums.
    """

    NVFP4 = Recipe("NVFP4", _nearest, _weight, _gradient, _weight, _rotated_gradient, _rotated)
    NVFP4_RN = _uniform("NVFP4_RN", _nearest, _nearest)
    MXFP4 = _uniform("MXFP4", Operand(MXFP4), Operand(MXFP4))
    MXFP6 = _uniform("MXFP6", Operand(MXFP6_E2M3), Operand(MXFP6_E3M2))
    MXFP8 = _uniform("MXFP8", Operand(MXFP8_E4M3), Operand(MXFP8_E4M3))
    FP8 = _uniform("FP8", Operand(FP8_E4M3), Operand(FP8_E5M2))
    BF16 = Recipe("BF16")


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        recipes.NVFP4,
        recipes.NVFP4_RN,
        recipes.MXFP4,
        recipes.MXFP6,
        recipes.MXFP8,
        recipes.FP8,
        recipes.BF16,
    )
}
"""The named recipes by name."""


# A context of JAX's, since only such a one is part of the cache key of jit: with a variable of
# a function traced under one recipe would silently keep it under another.
_default = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use_recipe(recipe: Recipe) -> Iterator[None]:
    """Makes ``recipe`` the default of every dot that is called or traced inside the block.

    The recipe is part of jit's cache key: a function traced under another one is traced again.

    Args:
        recipe: a `Recipe`.

    Yields:
        Nothing.
    """
    _check.instance("use_recipe", "recipe", recipe, Recipe, "jax_fp4.recipes.NVFP4")
    with _default(recipe):
        yield


def resolve(where: str, recipe: Recipe | None) -> Recipe:
    """``recipe``, or else the default in force."""
    if recipe is None:
        current = _default.value
        return recipes.NVFP4 if current is None else current
    _check.instance(where, "recipe", recipe, Recipe, "jax_fp4.recipes.NVFP4")
    return recipe
