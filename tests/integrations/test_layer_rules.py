"""Layer rules: which paths are quantized, and what is refused."""

from __future__ import annotations

import re

import pytest

import jax_fp4 as fp4
from jax_fp4.integrations import KEEP, LayerRules

BY_BLOCK = LayerRules(keep_first=1, keep_last=2, blocks=12)


@pytest.mark.parametrize(
    ("path", "quantized"),
    [
        ("", True),
        ("Dense_0", True),
        ("decoder/layers_3/mlp/wi_0", True),
        ("layers/3/self_attention/query", True),
        ("heads/Dense_0", True),
        ("decoder/gate_proj", True),
        ("Embed_0", False),
        ("token_embedder", False),
        ("lm_head", False),
        ("head/Dense_0", False),
        ("decoder/logits_dense", False),
        ("layers_3/MoeBlock_0/gate", False),
        ("layers_3/router/kernel", False),
    ],
)
def test_the_default_keeps_embeddings_head_and_router(path: str, quantized: bool) -> None:
    """A module is kept with everything in it, by its whole name."""
    assert LayerRules().quantizes(path) is quantized


@pytest.mark.parametrize(
    ("path", "quantized"),
    [
        ("decoder/layers_0/mlp/wi", False),
        ("decoder/layers_1/mlp/wi", True),
        ("decoder/layers_9/mlp/wi", True),
        ("decoder/layers_10/mlp/wi", False),
        ("layers/11/mlp", False),
        ("layers/1/mlp", True),
        ("h_0", False),
        ("h_3/mlp", True),
        ("EncoderBlock_0/Dense_0", False),
        ("EncoderBlock_1/DecoderBlock_0/Dense_0", True),  # the outermost number counts
        ("LayerNorm_0/Dense_0", True),
        ("Dense_0", True),
        ("lm_head", False),
    ],
)
def test_first_and_last_blocks_are_kept_by_number(path: str, quantized: bool) -> None:
    """Blocks are numbered from 0, in any of the spellings of Linen and NNX."""
    assert BY_BLOCK.quantizes(path) is quantized


@pytest.mark.parametrize("path", ["decoder/layers/mlp/wi", "layers", "layers_12/mlp", "blocks/12"])
def test_a_block_that_no_number_fits_is_refused(path: str) -> None:
    """A scan traces one block for all, and a number beyond the count says the count is wrong."""
    with pytest.raises(ValueError, match=re.escape(f"a module {path!r}")):
        BY_BLOCK.quantizes(path)
    assert LayerRules().quantizes(path)


def test_only_what_the_rules_name_is_kept() -> None:
    """`keep` replaces the default; a pattern may name a module in its parent."""
    rules = LayerRules(keep=("mlp/wi_\\d",))
    assert not rules.quantizes("layers_0/mlp/wi_1")
    assert rules.quantizes("layers_0/mlp/wo")
    assert rules.quantizes("lm_head")
    assert not LayerRules(keep=(*KEEP, "attention")).quantizes("layers_0/attention/query")


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"recipe": "NVFP4"}, TypeError, "`recipe` must be of type Recipe"),
        ({"keep": "lm_head"}, TypeError, "`keep` must be regular expressions, got 'lm_head'"),
        ({"keep": ("(",)}, ValueError, "`keep` must be regular expressions, got '('"),
        ({"keep_first": -1}, TypeError, "`keep_first` must be a number of blocks, got -1"),
        ({"keep_last": 1}, ValueError, "`blocks` must be given with `keep_last`"),
        ({"keep_first": 2, "keep_last": 2, "blocks": 3}, ValueError, "got 2 + 2; keep fewer"),
    ],
)
def test_wrong_rules_are_refused(arguments: dict, kind: type[Exception], words: str) -> None:
    """Before any model is seen, and with the way out."""
    with pytest.raises(kind, match=re.escape(words)):
        LayerRules(**arguments)


def test_equal_rules_are_equal_and_hash_alike() -> None:
    """Flax compares modules by their fields, and jit keeps what it compiled for equal ones."""
    rules = LayerRules(fp4.recipes.MXFP8, keep=["a"])  # pyright: ignore[reportArgumentType]
    assert rules == LayerRules(fp4.recipes.MXFP8, keep=("a",))
    assert hash(rules) == hash(LayerRules(fp4.recipes.MXFP8, keep=("a",)))
