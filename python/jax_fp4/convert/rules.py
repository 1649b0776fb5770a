"""Which tensors are quantized, how, and which of them share a tensor scale.

A rules file is TOML:

    fused = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]

    [[rule]]
    match = ["*embed*", "lm_head.*"]   # shell patterns of tensor names; the first rule that matches
    format = "keep"                    # decides, and what no rule matches stays

    [[rule]]
    match = "*.mlp.*.weight"
    format = "mxfp8"
    method = "mse"
    axis = -1                          # the contracted axis: -1, or -2 for kernels [in, out]
"""

from __future__ import annotations

import dataclasses
import fnmatch
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax_fp4._check import FLOAT_DTYPES
from jax_fp4.checkpoint.header import fail
from jax_fp4.formats import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    Format,
)

FORMATS = {
    "nvfp4": NVFP4,
    "mxfp4": MXFP4,
    "mxfp6": MXFP6_E2M3,
    "mxfp6_e3m2": MXFP6_E3M2,
    "mxfp8": MXFP8_E4M3,
    "mxfp8_e5m2": MXFP8_E5M2,
}
"""Formats by the names that the command and the rules use."""
KEEP = "keep"
METHODS = ("nearest", "four-over-six", "mse")

# What common models call layers that are projections of one input and run as one product.
DEFAULT_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("wi_0", "wi_1"),
)
# Layers that published FP4 checkpoints leave alone: small, or at the ends of the model.
_DEFAULT_KEEP = ("*embed*", "*lm_head*", "*norm*", "*router*", "*.gate.*", "*conv*", "*logits*")
_DEFAULT_QUANTIZE = ("*weight", "*kernel")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Tensors whose name matches one of the patterns get a format, None to stay as they are."""

    match: tuple[str, ...]
    format: Format | None
    method: str = "nearest"
    axis: int | None = None

    def matches(self, name: str) -> bool:
        """Whether the rule is about a tensor."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What happens to a tensor: its format, or None and why it stays.

    Attributes:
        format: the block format, None where the tensor is copied.
        method: one of `METHODS`.
        axis: the axis that is quantized, -1 or -2.
        reason: why it stays; empty where it is quantized.
    """

    format: Format | None
    method: str = "nearest"
    axis: int = -1
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Rules:
    """All rules of a conversion.

    Attributes:
        rules: the first one that matches decides.
        fused: names of layers that share a tensor scale where the rest of their names is the same.
        path: the rules file, for errors; None for the default rules.
    """

    rules: tuple[Rule, ...]
    fused: tuple[tuple[str, ...], ...]
    path: Path | None = None

    def decide(self, name: str, dtype: str, shape: Sequence[int]) -> Decision:
        """What happens to a tensor.

        Raises:
            CheckpointError: a rule names this very tensor, which cannot be quantized so.
        """
        rule = next((rule for rule in self.rules if rule.matches(name)), None)
        if rule is None:
            return Decision(None, reason="no rule")
        if rule.format is None:
            return Decision(None, reason="rule")
        axis = rule.axis
        if axis is None:
            axis = -2 if name.endswith("kernel") else -1
        reason = _obstacle(rule.format, dtype, shape, axis)
        if reason and name in rule.match and self.path is not None:
            fail(self.path, name, f"fit for {rule.format}", reason, 'give it format = "keep"')
        if reason:
            return Decision(None, reason=reason)
        return Decision(rule.format, rule.method, axis)

    def check_used(self, names: Iterable[str]) -> None:
        """Every rule of a file is the first one to match some tensor."""
        if self.path is None:
            return
        unused = list(self.rules)
        for name in names:
            rule = next((rule for rule in self.rules if rule.matches(name)), None)
            if rule in unused:
                unused.remove(rule)
        if unused:
            match = ", ".join(unused[0].match)
            way_out = "correct or drop it; an earlier rule may have taken its tensors"
            fail(self.path, f"rule {match}", "the first to match some tensor", "none", way_out)

    def group(self, name: str) -> str | None:
        """The name of the group with which a tensor shares its tensor scale; None if none."""
        parts = name.split(".")
        for i, part in enumerate(parts):
            for members in self.fused:
                if part in members:
                    return ".".join([*parts[:i], "+".join(members), *parts[i + 1 :]])
        return None


def _obstacle(format: Format, dtype: str, shape: Sequence[int], axis: int) -> str:
    if dtype not in FLOAT_DTYPES:
        return f"of dtype {dtype}"
    if len(shape) < 2:
        return f"of rank {len(shape)}"
    if not all(shape):
        return "empty"
    if shape[axis] % format.block:
        return f"{shape[axis]} elements along axis {axis}, no multiple of {format.block}"
    return ""


def default_rules(format: Format, method: str) -> Rules:
    """Quantizes ``*weight`` and ``*kernel``, except embeddings, heads, norms, routers and gates."""
    return Rules(
        (Rule(_DEFAULT_KEEP, None), Rule(_DEFAULT_QUANTIZE, format, method)), DEFAULT_FUSED
    )


def read_rules(path: Path, format: Format | None, method: str) -> Rules:
    """The rules of a file.

    Args:
        path: the TOML file.
        format: of rules that name none; None where each must name one ("mixed").
        method: of rules that name none.

    Raises:
        CheckpointError: the file cannot be read, or says something that is not known.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(path, None, "a file that can be read", str(error.strerror), "check the path")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fail(path, None, "a TOML file", str(error)[:200], "see docs/checkpoints.md")
    unknown = set(content) - {"rule", "fused"}
    if unknown or not isinstance(content.get("rule", []), list):
        got = ", ".join(sorted(unknown)) or "rule as no list"
        fail(path, None, "a file with [[rule]] and fused", got, "see docs/checkpoints.md")
    rules = tuple(
        _rule(path, number, item, format, method)
        for number, item in enumerate(content.get("rule", []), start=1)
    )
    if not rules:
        fail(path, None, "a file with one [[rule]] or more", "none", "see docs/checkpoints.md")
    fused = content.get("fused", [list(members) for members in DEFAULT_FUSED])
    if not isinstance(fused, list) or not all(map(_strings, fused)):
        fail(path, "fused", "a list of lists of names", repr(fused)[:80], "for example [['w1']]")
    return Rules(rules, tuple(tuple(members) for members in fused), path)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _rule(path: Path, number: int, item: Any, format: Format | None, method: str) -> Rule:
    what = f"rule {number}"
    if not isinstance(item, dict) or "match" not in item:
        fail(path, what, "a table with match", repr(item)[:80], 'add match = "*.weight"')
    unknown = set(item) - {"match", "format", "method", "axis"}
    if unknown:
        got = ", ".join(sorted(unknown))
        fail(path, what, "of match, format, method and axis", got, "correct the name")
    match = [item["match"]] if isinstance(item["match"], str) else item["match"]
    if not _strings(match) or not match:
        fail(path, f"{what}, match", "a pattern or several", repr(match)[:80], "quote it")
    name = item.get("format")
    if name is None and format is None:
        fail(path, what, "with a format, since --to is mixed", "none", "add one to each rule")
    if name is not None and name not in (*FORMATS, KEEP):
        choices = ", ".join((*FORMATS, KEEP))
        fail(path, f"{what}, format", f"one of {choices}", repr(name)[:40], "choose one")
    chosen = format if name is None else FORMATS.get(name)
    way = item.get("method", method)
    if way not in METHODS:
        fail(path, f"{what}, method", f"one of {', '.join(METHODS)}", repr(way)[:40], "choose one")
    if way == "four-over-six" and chosen is not None and chosen is not NVFP4:
        if "method" in item:
            fail(path, f"{what}, method", f"nearest or mse for {chosen}", way, "choose one")
        way = "nearest"
    axis = item.get("axis")
    if axis is not None and (isinstance(axis, bool) or axis not in (-1, -2)):
        fail(path, f"{what}, axis", "-1 or -2", repr(axis)[:40], "name the contracted axis")
    return Rule(tuple(match), chosen, way, axis)
