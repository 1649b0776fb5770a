"""Which layers of a model are quantized: rules on the paths of modules, as data.

Flax, Qwix and MaxText all name a module by its path, "decoder/layers_3/mlp/wi"; the three
integrations ask the same `LayerRules`.
"""

from __future__ import annotations

import dataclasses
import re

from jax_fp4 import _check
from jax_fp4.recipe import Recipe

KEEP = (
    r".*[eE]mbed.*",
    r"(lm_|output_)?head",
    r".*[lL]ogits.*",
    r".*[rR]outer.*",
    r"gate",
)
"""Modules that recipes leave alone: embeddings, the head, the router of a mixture of experts."""

_BLOCK = re.compile(r"(?:^|/)(?:[A-Za-z_]*(?:[lL]ayer|[bB]lock)s?|h)(?:[_/](\d+)(?![^/])|(?![^/]))")
"""The outermost module of a row, and its number: layers_3, layers/3, EncoderBlock_3, h_3."""


@dataclasses.dataclass(frozen=True)
class LayerRules:
    r"""Which layers are quantized, and how; the others keep jax's own products.

    A path is the names of modules from the outermost one, joined by "/".

    Attributes:
        recipe: of the layers that are quantized; None for that of `use_recipe` where the model is
            called or traced, or else ``recipes.NVFP4``.
        keep: regular expressions. A module is kept if one of them is its name, or the name of a
            module around it, as a whole; "mlp/wi" is a name in its parent. Default: `KEEP`.
        keep_first: how many of the first blocks are kept. Blocks are modules in a row, numbered
            from 0: "layers_0", "layers/0" or "DecoderBlock_0" are the first.
        keep_last: how many of the last ones; needs ``blocks``.
        blocks: how many there are.

    Example:
        >>> rules = LayerRules(keep_first=1, keep_last=1, blocks=4)
        >>> rules.quantizes("decoder/layers_1/mlp/wi"), rules.quantizes("decoder/layers_3/mlp/wi")
        (True, False)
    """

    recipe: Recipe | None = None
    keep: tuple[str, ...] = KEEP
    keep_first: int = 0
    keep_last: int = 0
    blocks: int | None = None

    def __post_init__(self) -> None:
        """Checks the expressions and the counts."""
        where = "LayerRules"
        if self.recipe is not None:
            _check.instance(where, "recipe", self.recipe, Recipe, "jax_fp4.recipes.NVFP4")
        if isinstance(self.keep, str) or not all(isinstance(p, str) for p in self.keep):
            _check.fail(
                where,
                "keep",
                "regular expressions",
                repr(self.keep),
                'pass ("lm_head",)',
                TypeError,
            )
        object.__setattr__(self, "keep", tuple(self.keep))
        for pattern in self.keep:
            try:
                re.compile(pattern)
            except re.error as error:
                _check.fail(
                    where, "keep", "regular expressions", repr(pattern), f"mend it: {error}"
                )
        for name in ("keep_first", "keep_last", "blocks"):
            value = getattr(self, name)
            if name == "blocks" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                _check.fail(where, name, "a number of blocks", repr(value), "count them", TypeError)
        if self.keep_last and self.blocks is None:
            _check.fail(
                where, "blocks", "given with `keep_last`", "None", "say how many blocks there are"
            )
        if self.blocks is not None and self.keep_first + self.keep_last > self.blocks:
            _check.fail(
                where,
                "keep_first",
                f"at most {self.blocks} together with `keep_last`, since there are no more blocks",
                f"{self.keep_first} + {self.keep_last}",
                "keep fewer of them",
            )

    def quantizes(self, path: str) -> bool:
        """Whether the products of a module are quantized.

        Args:
            path: names of modules from the outermost one, joined by "/".

        Returns:
            False if the module is kept.

        Raises:
            ValueError: blocks are kept by number, and this one has none, or one that ``blocks``
                does not have.
        """
        if any(re.fullmatch(rf"(?:.*/)?(?:{pattern})(?:/.*)?", path) for pattern in self.keep):
            return False
        block = _BLOCK.search(path)
        if block is None or not (self.keep_first or self.keep_last):
            return True
        number = None if block[1] is None else int(block[1])
        if number is None or (self.blocks is not None and number >= self.blocks):
            _check.fail(
                "LayerRules",
                "keep_first" if self.keep_first else "keep_last",
                f"0 where a block has no number{'' if number is None else f' below {self.blocks}'}",
                f"a module {path!r}",
                "a scan over layers traces one for all: unroll it, or keep none by number; or "
                "correct `blocks`",
            )
        last = self.blocks is not None and number >= self.blocks - self.keep_last
        return number >= self.keep_first and not last


def as_rules(where: str, rules: LayerRules | Recipe | None) -> LayerRules:
    """What the integrations take: rules, or a recipe for every layer that is not in `KEEP`."""
    if rules is None or isinstance(rules, Recipe):
        return LayerRules(rules)
    _check.instance(where, "rules", rules, LayerRules, "jax_fp4.integrations.LayerRules()")
    return rules
