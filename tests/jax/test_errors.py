"""Bad input to every public function: what is raised, what it says, and that nothing ran before.

Contract: a TypeError or ValueError whose message names the argument, what was expected, what came,
and the way out.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _native
from support.jax_reference import gaussian

X = jnp.ones((4, 32))
Q = fp4.quantize(X)
MX = fp4.quantize(X, fp4.MXFP4)
SEED = jnp.array([1, 2], jnp.uint32)
KEY = jax.random.key(0)
NEAREST = fp4.Operand(fp4.NVFP4)
DIMS = (((1,), (0,)), ((), ()))

# function, arguments, keywords, exception, pieces of the message in order
Case = tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], list[str]]


def quantize_cases() -> list[Case]:
    """Wrong arrays, formats, axes, options, seeds and keys."""
    call = fp4.quantize
    stochastic = {"rounding": "stochastic"}
    return [
        (call, ([[1.0, 2.0]],), {}, TypeError, ["quantize", "`x`", "an array", "list", "asarray"]),
        (call, ("x",), {}, TypeError, ["`x`", "str"]),
        (call, (None,), {}, TypeError, ["`x`", "NoneType"]),
        (call, (1.0,), {}, TypeError, ["`x`", "float"]),
        (call, (jnp.ones((4, 4), jnp.int32),), {}, TypeError,
         ["`x`", "float32", "int32", "astype"]),
        (call, (np.ones((4, 4)),), {}, TypeError, ["`x`", "float32", "float64", "astype"]),
        (call, (jnp.ones((4, 4), jnp.float8_e4m3fn),), {}, TypeError, ["`x`", "float8_e4m3fn"]),
        (call, (jnp.ones((4, 4), jnp.complex64),), {}, TypeError, ["`x`", "complex64"]),
        (call, (jnp.ones((4, 4), bool),), {}, TypeError, ["`x`", "bool"]),
        (call, (jnp.ones(4),), {}, ValueError, ["`x`", "rank 2", r"\(4,\)", "expand_dims"]),
        (call, (jnp.float32(1),), {}, ValueError, ["`x`", "rank 2", r"\(\)"]),
        (call, (X, "NVFP4"), {}, TypeError, ["`format`", "Format", "str", "jax_fp4.NVFP4"]),
        (call, (X, None), {}, TypeError, ["`format`", "Format", "NoneType"]),
        (call, (X,), {"axis": 2}, ValueError, ["`axis`", "-2 and 1", "2"]),
        (call, (X,), {"axis": -3}, ValueError, ["`axis`", "-2 and 1", "-3"]),
        (call, (X,), {"axis": 1.0}, TypeError, ["`axis`", "int", "1.0"]),
        (call, (X,), {"axis": None}, TypeError, ["`axis`", "int", "None"]),
        (call, (X,), {"axis": True}, TypeError, ["`axis`", "int", "True"]),
        (call, (X,), {"axis": (0, 1)}, TypeError, ["`axis`", "one axis|int"]),
        (call, (X,), {"scaling": "3d"}, ValueError, ["`scaling`", "'1d', '2d'", "'3d'"]),
        (call, (X,), {"scaling": 2}, ValueError, ["`scaling`", "'1d', '2d'", "2"]),
        (call, (X,), {"rounding": "up"}, ValueError,
         ["`rounding`", "'nearest', 'stochastic'", "'up'"]),
        (call, (X,), {"scale_rule": "ceil"}, ValueError,
         ["`scale_rule`", "'rceil', 'floor'", "'ceil'"]),
        (call, (X,), {"scale_rule": "floor"}, ValueError,
         ["`scale_rule`", "NVFP4", "'?\"?floor", "MX"]),
        (call, (X,), {"four_over_six": 1}, ValueError, ["`four_over_six`", "True, False", "1"]),
        (call, (X, fp4.MXFP4), {"four_over_six": True}, ValueError,
         ["`four_over_six`", "NVFP4", "MXFP4"]),
        (call, (X,), {"four_over_six": True, "seed": SEED, **stochastic}, ValueError,
         ["`four_over_six`", "nearest", "stochastic"]),
        (call, (X,), {"hadamard": [1] * 15}, ValueError, ["`hadamard`", "16 signs", r"\[1"]),
        (call, (X,), {"hadamard": [1] * 15 + [2]}, ValueError, ["`hadamard`", "1 or -1"]),
        (call, (X,), {"hadamard": "yes"}, ValueError, ["`hadamard`", "16 signs", "yes"]),
        (call, (X,), {"hadamard": True, "scaling": "2d"}, ValueError,
         ["`scaling`", "1d", "hadamard", "2d"]),
        (call, (X, fp4.FP8_E4M3), {"scaling": "2d"}, ValueError, ["`scaling`", "FP8_E4M3", "2d"]),
        (call, (X,), {"stream": -1}, ValueError, ["`stream`", r"\[0, 2\*\*32\)", "-1"]),
        (call, (X,), {"stream": 2**32}, ValueError, ["`stream`", r"\[0, 2\*\*32\)", "4294967296"]),
        (call, (X,), {"stream": 1.0}, ValueError, ["`stream`", "int", "1.0"]),
        (call, (X,), {"stream": jnp.uint32(1)}, ValueError, ["`stream`", "int", "static"]),
        (call, (X,), stochastic, ValueError, ["`seed`", "uint32", "neither", "jax.random.key"]),
        (call, (X,), {"seed": SEED}, ValueError, ["`rounding`", "stochastic", "nearest", "seed"]),
        (call, (X,), {"key": KEY}, ValueError, ["`rounding`", "stochastic", "nearest"]),
        (call, (X,), {"seed": SEED, "key": KEY, **stochastic}, ValueError,
         ["`seed`", "key", "both"]),
        (call, (X,), {"seed": 3, **stochastic}, TypeError, ["`seed`", r"uint32\[2\]", "3", "low"]),
        (call, (X,), {"seed": SEED[:1], **stochastic}, ValueError,
         ["`seed`", r"uint32\[2\]", r"uint32\[1\]"]),
        (call, (X,), {"seed": jnp.ones(2), **stochastic}, ValueError,
         ["`seed`", r"uint32\[2\]", "float32"]),
        (call, (X,), {"key": 3, **stochastic}, TypeError, ["`key`", "jax.random key", "int"]),
        (call, (X,), {"key": jax.random.split(KEY), **stochastic}, TypeError,
         ["`key`", "one", "split"]),
        (call, (X,), {"key": jnp.ones(2, jnp.int32), **stochastic}, TypeError, ["`key`", "int32"]),
        (call, (X,), {"amax": jnp.ones(3)}, ValueError, ["`amax`", r"\(\)", r"\(3,\)"]),
        (call, (X,), {"amax": "a"}, (TypeError, ValueError), ["`amax`", "a"]),
        (call, (X,), {"amax": -1.0}, ValueError, ["`amax`", "-1.0"]),
        (call, (X,), {"amax": float("nan")}, ValueError, ["`amax`", "nan"]),
        (call, (X,), {"amax_axes": "d"}, ValueError, ["`amax_axes`", "mesh axes", "'d'", "drop"]),
        (call, (X,), {"amax_axes": 0}, TypeError, ["`amax_axes`", "name", "0"]),
        (call, (X,), {"amax_axes": ("d", 2)}, TypeError, ["`amax_axes`", "name", "2"]),
        (call, (X, fp4.MXFP4), {"amax": 1.0}, ValueError, ["`amax`", "None", "MXFP4", "drop"]),
    ]  # fmt: skip


def both_cases() -> list[Case]:
    """quantize_both: unknown options anywhere, and everything that quantize refuses."""
    call = fp4.quantize_both
    return [
        (
            call,
            (X,),
            {"scalling": "2d"},
            TypeError,
            ["quantize_both", "scalling", "scaling", "unknown"],
        ),
        (call, (X,), {"row": {"axis": 0}}, TypeError, ["axis", "unknown", "row"]),
        (call, (X,), {"col": {"seed": SEED}}, TypeError, ["seed", "unknown", "col"]),
        (call, (X,), {"row": {"scaling": "x"}}, ValueError, ["`scaling`", "'1d', '2d'", "'x'"]),
        (call, (X,), {"col": {"rounding": "stochastic"}}, ValueError, ["`seed`", "neither"]),
        (call, (X,), {"seed": SEED}, ValueError, ["`rounding`", "stochastic"]),
        (call, (jnp.ones(4),), {}, ValueError, ["`x`", "rank 2"]),
        (call, (X, "MXFP4"), {}, TypeError, ["`format`", "Format"]),
    ]


def dequantize_cases() -> list[Case]:
    """Things that are no BlockScaledArray, or one whose parts do not fit."""
    call = fp4.dequantize
    replace = dataclasses.replace
    return [
        (call, (X,), {}, TypeError, ["dequantize", "`q`", "BlockScaledArray", "quantize"]),
        (call, (Q,), {"dtype": jnp.int8}, TypeError, ["`dtype`", "float32", "int8"]),
        (call, (Q,), {"dtype": "nonsense"}, TypeError, ["`dtype`", "dtype", "nonsense"]),
        (call, (replace(Q, values=Q.values[:, :8]),), {}, ValueError,
         ["`q.values`", r"\(4, 16\)", r"\(4, 8\)", "quantize"]),
        (call, (replace(Q, scales=Q.scales[:3]),), {}, ValueError,
         ["`q.scales`", r"\(4, 2\)", r"\(3, 2\)"]),
        (call, (replace(Q, scales=Q.scales.astype(jnp.int8)),), {}, TypeError,
         ["`q.scales`", "uint8", "int8"]),
        (call, (replace(Q, global_scale=jnp.ones(2)),), {}, ValueError,
         ["`q.global_scale`", r"\(\)", r"\(2,\)"]),
        (call, (replace(Q, length=40),), {}, ValueError, ["`q.values`", "40"]),
        (call, (replace(Q, layout="tiled"),), {}, ValueError,
         ["`q.scales`", r"\(1, 1, 32, 4, 4\)"]),
        (call, (replace(Q, format=fp4.MXFP6_E2M3),), {}, ValueError, ["`q.values`", r"\(4, 96\)"]),
    ]  # fmt: skip


def scaled_matmul_cases() -> list[Case]:
    """Operands, formats, leading dimensions, bias and accumulate that do not go together."""
    call = fp4.scaled_matmul
    stacked = jax.vmap(fp4.quantize)(jnp.ones((2, 4, 32)))
    other = jax.vmap(fp4.quantize)(jnp.ones((3, 4, 32)))
    return [
        (call, (X, Q), {}, TypeError, ["scaled_matmul", "`a`", "BlockScaledArray"]),
        (call, (Q, None), {}, TypeError, ["`b`", "BlockScaledArray", "NoneType"]),
        (call, (Q, fp4.quantize(jnp.ones((4, 33)))), {}, ValueError,
         ["`b`", "K = 32", "33", "contracted"]),
        (call, (Q, MX), {}, ValueError, ["`b.format`", "blocks of 16", "MXFP4", "NVFP4"]),
        (call, (stacked, other), {}, ValueError, ["`b`", r"\(2,\)", r"\(3,\)", "vmap"]),
        (call, (Q, Q), {"out_dtype": jnp.int32}, TypeError, ["`out_dtype`", "float32", "int32"]),
        (call, (Q, Q), {"out_dtype": 3.5}, TypeError, ["`out_dtype`", "3.5"]),
        (call, (Q, Q), {"bias": jnp.ones(5)}, ValueError, ["`bias`", r"\(4,\)", r"\(5,\)"]),
        (call, (Q, Q), {"bias": jnp.ones((1, 4))}, ValueError, ["`bias`", r"\(4,\)", r"\(1, 4\)"]),
        (call, (Q, Q), {"bias": [0.0] * 4}, TypeError, ["`bias`", "array", "list"]),
        (call, (Q, Q), {"bias": jnp.ones(4, jnp.int32)}, TypeError, ["`bias`", "int32"]),
        (call, (Q, Q), {"accumulate": jnp.ones((4, 5))}, ValueError,
         ["`accumulate`", r"\(4, 4\)", r"\(4, 5\)"]),
        (call, (stacked, Q), {"accumulate": jnp.ones((4, 4))}, ValueError,
         ["`accumulate`", r"\(2, 4, 4\)"]),
        (call, (Q, Q), {"accumulate": 1.0}, TypeError, ["`accumulate`", "array", "float"]),
    ]  # fmt: skip


def product_cases() -> list[Case]:
    """dot, matmul and dot_general; what jax refuses is refused with its exception."""
    ok = jnp.ones((32, 4))
    cases: list[Case] = []
    for call, left, right, more in (
        (fp4.dot, "a", "b", ()),
        (fp4.matmul, "a", "b", ()),
        (fp4.dot_general, "lhs", "rhs", (DIMS,)),
    ):
        name = call.__name__
        cases += [
            (call, (None, ok, *more), {}, TypeError, [f"`{left}`", "array", "NoneType"]),
            (call, ([1.0], ok, *more), {}, TypeError, [f"`{left}`", "array", "list", "asarray"]),
            (call, (Q, ok, *more), {}, TypeError,
             [f"`{left}`", "array", "BlockScaledArray", "right"]),
            (call, (X, X, *more), {}, TypeError,
             [name, f"`{left}`, `{right}`", r"float32\[4, 32\]", "contracting", "same shape"]),
            (call, (X, ok, *more), {"recipe": "NVFP4"}, TypeError,
             ["`recipe`", "Recipe", "recipes.NVFP4"]),
            (call, (X, ok, *more), {"recipe": fp4.NVFP4}, TypeError, ["`recipe`", "Recipe"]),
            (call, (X, ok, *more), {"key": 1}, TypeError, ["`key`", "jax.random key", "int"]),
            (call, (X, ok, *more), {"key": jax.random.split(KEY)}, TypeError, ["`key`", "one"]),
            (call, (X, ok, *more), {"precision": "F32_F32_F32"}, ValueError,
             ["`precision`", "algorithm"]),
            (call, (X, ok, *more), {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32},
             ValueError,
             ["`precision`", "algorithm"]),
            (call, (X, fp4.quantize(ok), *more), {}, ValueError,
             ["`rhs`", "contracted along the axis", "-1", "quantize_weight"]),
            (call, (X, fp4.quantize(ok, fp4.MXFP4, axis=0), *more), {}, ValueError,
             ["`rhs`", "blocks of 16", "MXFP4", "quantize_weight"]),
        ]  # fmt: skip
    batched = jnp.ones((2, 4, 32)), jnp.ones((3, 32, 4))
    general = fp4.dot_general
    says = ["`lhs`, `rhs`", r"float32\[4, 32\]", "it says"]
    return [
        *cases,
        (fp4.matmul, (jnp.float32(1), ok), {}, ValueError, ["`a`", r"float32\[\]", "ndim"]),
        (fp4.matmul, (X, 2.0), {}, ValueError, ["`b`", r"float32\[\]", "ndim"]),
        (fp4.matmul, batched, {}, ValueError, [r"\[2, 4, 32\]", r"\[3, 32, 4\]", "Incompatible"]),
        (fp4.dot, (2.0, X), {"key": 1}, TypeError, ["`key`"]),
        (general, (X, ok, (1, 0)), {}, TypeError, says),
        (general, (X, ok, (((1,), (0,)),)), {}, ValueError, says),
        (general, (X, ok, (((2,), (0,)), ((), ()))), {}, TypeError, [*says, "less than"]),
        (general, (X, ok, (((-1,), (0,)), ((), ()))), {}, TypeError, [*says, "nonnegative"]),
        (general, (X, ok, (((1,), (0,)), ((1,), (1,)))), {}, TypeError, [*says, "disjoint"]),
        (general, (X, ok, (((1,), (0, 1)), ((), ()))), {}, TypeError, [*says, r"\(32,\)"]),
        (general, (X, ok, (((1,), (0,)), ((0,), ()))), {}, TypeError, [*says, "batch"]),
        (fp4.ragged_dot, (X, ok[None], [4]), {}, TypeError, ["`group_sizes`", "array", "list"]),
        (fp4.ragged_dot, (X, ok[None], jnp.ones(1)), {}, TypeError,
         ["`lhs`, `rhs`, `group_sizes`", r"float32\[1\]", "integer"]),
        (fp4.ragged_dot, (X, ok[None], jnp.ones(2, int)), {}, TypeError, [r"int32\[2\]", "group"]),
        (fp4.ragged_dot, (X, ok[None], jnp.ones(1, int)), {"group_offset": jnp.zeros(1, int)},
         TypeError, ["`group_offset`", "None", "cut"]),
        (fp4.ragged_dot, (X, Q, jnp.ones(1, int)), {}, TypeError, ["`rhs`", "BlockScaledArray"]),
        (fp4.einsum, ("ij,jk", X, X), {}, ValueError, [r"`operands\[0\]`, `operands\[1\]`"]),
        (fp4.einsum, ("ij,jk", X, [1.0]), {}, TypeError, [r"`operands\[1\]`", "array", "list"]),
        (fp4.quantize_weight, (X[None],), {}, ValueError, ["`w`", "matrix", "vmap"]),
        (fp4.quantize_weight, (X,), {"axis": 2}, ValueError, ["`axis`", "-2 and 1", "2"]),
        (fp4.quantize_weight, (X.astype(int),), {}, TypeError, ["`w`", "float32", "int32"]),
        (fp4.quantize_weight, (X,), {"recipe": fp4.recipes.BF16}, ValueError,
         ["`recipe`", "quantizes", "BF16"]),
    ]  # fmt: skip


def recipe_cases() -> list[Case]:
    """Recipes that could not be run are refused when they are made."""
    operand, recipe = fp4.Operand, fp4.Recipe
    return [
        (operand, ("NVFP4",), {}, TypeError, ["Operand", "`format`", "Format", "jax_fp4.NVFP4"]),
        (operand, (fp4.NVFP4,), {"scaling": "3d"}, ValueError, ["`scaling`", "'1d', '2d'", "'3d'"]),
        (operand, (fp4.NVFP4,), {"rounding": "Stochastic"}, ValueError,
         ["`rounding`", "'Stochastic'"]),
        (operand, (fp4.NVFP4,), {"hadamard": "yes"}, ValueError, ["`hadamard`", "16 signs"]),
        (operand, (fp4.NVFP4,), {"hadamard": (1,) * 15}, ValueError, ["`hadamard`", "16 signs"]),
        (operand, (fp4.NVFP4,), {"hadamard": True, "scaling": "2d"}, ValueError,
         ["`scaling`", "hadamard"]),
        (operand, (fp4.MXFP4,), {"scale_rule": "up"}, ValueError, ["`scale_rule`", "'up'"]),
        (operand, (fp4.NVFP4,), {"scale_rule": "floor"}, ValueError, ["`scale_rule`", "NVFP4"]),
        (operand, (fp4.MXFP4,), {"four_over_six": True}, ValueError, ["`four_over_six`", "MXFP4"]),
        (operand, (fp4.FP8_E4M3,), {"scaling": "2d"}, ValueError, ["`scaling`", "FP8_E4M3"]),
        (recipe, ("r", NEAREST), {}, ValueError,
         ["'r'", "`fprop_w`", "fprop_x", "both sides or on none"]),
        (recipe, ("r",), {"wgrad_x": NEAREST}, ValueError, ["`wgrad_x`", "wgrad_dy", "None"]),
        (recipe, ("r", fp4.NVFP4, NEAREST), {}, TypeError, ["`fprop_x`", "Operand"]),
        (recipe, ("r", NEAREST, fp4.Operand(fp4.MXFP4)), {}, ValueError,
         ["`fprop_w.format`", "blocks of 16", "MXFP4", "NVFP4"]),
        (recipe, ("r", NEAREST, fp4.Operand(fp4.NVFP4, hadamard=True)), {}, ValueError,
         ["`fprop_w.hadamard`", "False", "True", "both or none"]),
        (recipe, ("r",), {"weight": "left"}, ValueError,
         ["`weight`", "'auto', 'rhs', 'lhs'", "'left'"]),
        (fp4.Format, ("bad", "e9m9", "ue4m3", 16), {}, ValueError, ["e2m1", "e9m9"]),
        (fp4.Format, ("bad", "e2m1", "foo", 32), {}, ValueError, ["ue4m3", "foo"]),
        (fp4.Format, ("bad", "e2m1", "ue4m3", 32), {}, ValueError, ["16", "32"]),
        (fp4.Format, ("bad", "e4m3", "ue4m3", 16), {}, ValueError, ["e2m1", "e4m3"]),
    ]  # fmt: skip


CASES = [
    pytest.param(*case, id=f"{case[0].__name__}-{i}-{case[4][-1]}")
    for i, case in enumerate(
        [
            *quantize_cases(),
            *both_cases(),
            *dequantize_cases(),
            *scaled_matmul_cases(),
            *product_cases(),
            *recipe_cases(),
        ]
    )
]


@pytest.mark.parametrize(("function", "args", "keywords", "kind", "pieces"), CASES)
def test_bad_input_is_refused_in_words(
    function: Any,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    kind: type[Exception],
    pieces: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names argument, expected, got and way out; no primitive of ours ran before."""

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was computed before the error")

    for module in list(sys.modules.values()):
        if module.__name__.startswith("jax_fp4."):
            for value in list(vars(module).values()):
                if isinstance(value, jax.extend.core.Primitive):
                    monkeypatch.setattr(value, "bind", forbidden)
    with pytest.raises(kind) as caught:
        function(*args, **keywords)
    message = str(caught.value)
    position = 0
    for piece in pieces:
        found = re.compile(piece).search(message, position)
        assert found, f"{piece!r} is missing, or out of order, in: {message}"
        position = found.end() if piece != pieces[-1] else position


def test_unknown_keywords_raise() -> None:
    """A misspelt or unsupported keyword is never ignored, by any public function."""
    for function, args in (
        (fp4.quantize, (X,)),
        (fp4.dequantize, (Q,)),
        (fp4.scaled_matmul, (Q, Q)),
        (fp4.dot, (X, X.T)),
        (fp4.matmul, (X, X.T)),
        (fp4.dot_general, (X, X.T, DIMS)),
        (fp4.einsum, ("ij,jk", X, X.T)),
        (fp4.ragged_dot, (X, X.T[None], jnp.ones(1, int))),
        (fp4.quantize_weight, (X,)),
        (fp4.quantize_both, (X,)),
    ):
        with pytest.raises(TypeError, match="out_shardings"):
            function(*args, out_shardings=None)


def test_use_recipe_takes_a_recipe() -> None:
    """Names and None are refused before anything changes."""
    for bad in ("NVFP4", None, fp4.NVFP4):
        with pytest.raises(TypeError, match=r"use_recipe.*`recipe`.*Recipe"), fp4.use_recipe(bad):
            pass
    assert fp4.dot(X, X.T).dtype == jnp.float32


def test_unknown_cpu_levels_are_refused() -> None:
    """The hook for tests names the levels that there are."""
    levels = "'model', 'portable', 'avx2', 'avx512', 'avx512_bf16', 'amx'"
    with pytest.raises(ValueError, match=rf"'turbo'.*{levels}"):
        _native.force_cpu_level("turbo")
    assert fp4.cpu_level() == fp4.best_cpu_level()


def test_errors_come_at_trace_time() -> None:
    """Under jit, vmap and grad the same errors are raised while tracing."""
    with pytest.raises(ValueError, match="`scaling`"):
        jax.jit(lambda x: fp4.quantize(x, scaling="3d"))(X)
    with pytest.raises(TypeError, match="`b`"):
        jax.vmap(fp4.dot)(jnp.ones((2, 4, 32)), jnp.ones((2, 31, 4)))
    with pytest.raises(ValueError, match="rank 2"):
        jax.vmap(fp4.quantize)(X)


def test_non_finite_operands_spoil_their_rows_and_columns_only() -> None:
    """NaN or Inf in a token makes its outputs NaN; all others are as without it, up to amax."""
    x, w = gaussian(1, (6, 64)), gaussian(2, (64, 5))
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        for recipe in fp4.RECIPES.values():
            if not recipe.quantized:
                continue
            y = np.asarray(fp4.dot(x.at[2, 7].set(bad), w, recipe=recipe))
            assert np.isnan(y[2]).all() and np.isfinite(np.delete(y, 2, 0)).all()
            y = np.asarray(fp4.dot(x, w.at[9, 3].set(bad), recipe=recipe))
            # With 2-D scales the tile, and so all 5 columns, is spoilt.
            spoilt = [3] if recipe.fprop_w and recipe.fprop_w.scaling == "1d" else range(5)
            assert np.isnan(y[:, spoilt]).all()
            assert np.isfinite(np.delete(y, spoilt, 1)).all()
