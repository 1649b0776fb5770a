"""Every function of JAX over quantize and dot: the bytes stay, whatever transforms the call.

Contract: eager, jit, vmap, scan, remat, while, cond and export give the same bits; a vmap is a
Python loop; no tensor is quantized twice under the named remat policy; recipes are part of jit's
key. What needs several devices runs in test_shard_map.py.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from oracles import quantizer
from support.jax_reference import assert_bytes, expect_f32, gaussian, same_bytes, widen

POLICY = jax.checkpoint_policies.save_only_these_names("quantization")
TARGETS = ("amax", "quantize", "dequantize", "scaled_matmul")
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(f"jax_fp4_{name}") for name in TARGETS]
X, W, V = gaussian(1, (19, 48), "bfloat16"), gaussian(2, (48, 33)), gaussian(3, (33, 20))
SEED = jnp.array([7, 9], jnp.uint32)


def quantized(x: Any) -> Any:
    """Both copies with every option that draws random bits or mixes elements."""
    return fp4.quantize_both(
        x, rounding="stochastic", seed=SEED, col={"hadamard": True, "stream": 1}
    )


def layers(x: Any, w: Any, v: Any) -> Any:
    """Two layers; only operations that round the same under every transform lie between them."""
    return fp4.dot(jnp.maximum(fp4.dot(x, w), 0), v, preferred_element_type=jnp.float32)


def gradients(x: Any, w: Any, v: Any) -> Any:
    """Gradients under cotangents that depend on the result, so that seeds do too."""
    y, back = jax.vjp(layers, x, w, v)
    return y, *back(y)


def loop(function: Any, *stacked: Any) -> Any:
    """The Python loop that a vmap stands for."""
    count = len(jax.tree.leaves(stacked[0])[0])
    results = [function(*jax.tree.map(lambda v, i=i: v[i], stacked)) for i in range(count)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def stack(count: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """`count` different arrays like each of `arrays`."""
    return tuple(
        jnp.stack([gaussian(10 * i + j, a.shape, a.dtype.name) for j in range(count)])
        for i, a in enumerate(arrays)
    )


# ---- jit, eager, disable_jit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [quantized, lambda x: gradients(x, W, V)], ids=["quantize", "dot"]
)
def test_eager_jit_and_disable_jit_agree(function: Any) -> None:
    """Compiling changes no bit, and neither does running operation by operation."""
    eager = function(X)
    same_bytes(jax.jit(function)(X), eager)
    with jax.disable_jit():
        same_bytes(function(X), eager)


def test_excess_precision_does_not_reach_the_numbers() -> None:
    """XLA may drop pairs of conversions (f32 -> bf16 -> f32) or not: the bytes are the same."""
    lowered = jax.jit(gradients).lower(X, W, V)
    wanted = lowered.compile()(X, W, V)
    for allow in (True, False):
        compiled = lowered.compile({"xla_allow_excess_precision": allow})
        same_bytes(compiled(X, W, V), wanted)


def test_subnormals_survive_compiled_code() -> None:
    """x = 1e-36: a subnormal global scale is not flushed, also after a jitted pass."""
    x = jnp.full((1, 16), 1e-36, jnp.float32)
    q = jax.jit(lambda v: jax.jit(fp4.quantize)(v))(x)
    assert_bytes(q, x)
    expect_f32(q.global_scale, [quantizer.quantize(widen(x), "NVFP4").global_scale])
    assert 0 < np.float64(np.asarray(q.global_scale)) < np.finfo(np.float32).tiny
    product = np.asarray(jax.jit(fp4.scaled_matmul)(q, fp4.quantize(jnp.ones((1, 16)))))
    assert np.isfinite(product).all() and product > 0


def test_donated_buffers_are_not_overwritten_early() -> None:
    """Donating operands and the accumulator leaves the result as it is."""
    wanted = gradients(X, W, V)
    copies = [jnp.array(v) for v in (X, W, V)]
    same_bytes(jax.jit(gradients, donate_argnums=(1, 2))(*copies), wanted)
    a, b = fp4.quantize(X), fp4.quantize(W, axis=0)
    start = gaussian(4, (19, 33))
    wanted = fp4.scaled_matmul(a, b, accumulate=start)
    add = jax.jit(lambda a, b, c: fp4.scaled_matmul(a, b, accumulate=c), donate_argnums=2)
    same_bytes(add(a, b, jnp.array(start)), wanted)


def test_recipes_are_part_of_the_key_of_jit() -> None:
    """use_recipe outside of jit retraces, inside it is traced in; blocks nest and are undone."""
    traces = []

    def call(x: Any, w: Any) -> Any:
        traces.append(1)
        return fp4.dot(x, w)

    function = jax.jit(call)
    explicit = {r.name: fp4.dot(X, W, recipe=r) for r in fp4.RECIPES.values()}
    same_bytes(function(X, W), explicit["NVFP4"])
    for _ in range(2):
        with fp4.use_recipe(fp4.recipes.MXFP8):
            same_bytes(function(X, W), explicit["MXFP8"])
            with fp4.use_recipe(fp4.recipes.FP8):
                same_bytes(function(X, W), explicit["FP8"])
            same_bytes(function(X, W), explicit["MXFP8"])
            same_bytes(fp4.dot(X, W), explicit["MXFP8"])
            same_bytes(fp4.dot(X, W, recipe=fp4.recipes.BF16), explicit["BF16"])
        same_bytes(function(X, W), explicit["NVFP4"])
    assert len(traces) == 3

    def inside(x: Any, w: Any) -> Any:
        with fp4.use_recipe(fp4.recipes.MXFP4):
            return fp4.dot(x, w)

    same_bytes(jax.jit(inside)(X, W), explicit["MXFP4"])
    with pytest.raises(RuntimeError, match="out"), fp4.use_recipe(fp4.recipes.FP8):
        raise RuntimeError("out")
    same_bytes(fp4.dot(X, W), explicit["NVFP4"])


def test_the_recipe_of_the_forward_pass_holds_in_the_backward_pass() -> None:
    """A backward pass that is run under another default recipe keeps its own."""
    with fp4.use_recipe(fp4.recipes.MXFP8):
        y, back = jax.vjp(fp4.dot, X, W)
        wanted = back(y)
    with fp4.use_recipe(fp4.recipes.BF16):
        same_bytes(back(y), wanted)


# ---- vmap ----------------------------------------------------------------------------------------


def test_vmap_of_quantize_is_a_loop() -> None:
    """in_axes 0, 1, -1, nested twice: own amax and own block numbers for each example."""
    (xs,) = stack(3, X)
    wanted = loop(quantized, xs)
    same_bytes(jax.vmap(quantized)(xs), wanted)
    same_bytes(jax.jit(jax.vmap(quantized, 1))(jnp.moveaxis(xs, 0, 1)), wanted)
    same_bytes(jax.vmap(quantized, -1)(jnp.moveaxis(xs, 0, -1)), wanted)
    nested = jax.vmap(jax.vmap(quantized), 1)(jnp.stack([xs, xs[::-1]], 1))
    same_bytes(jax.tree.map(lambda v: v[0], nested), wanted)
    same_bytes(jax.tree.map(lambda v: v[1, ::-1], nested), wanted)


@pytest.mark.parametrize(
    "in_axes", [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)], ids=str
)
def test_vmap_of_gradients_is_a_loop(in_axes: tuple[int | None, ...]) -> None:
    """Any operand mapped, shared or both; data-derived seeds are those of each example."""
    full = stack(3, X, W, V)
    args = [f if axis == 0 else one for f, axis, one in zip(full, in_axes, (X, W, V), strict=True)]

    def one(i: int) -> Any:
        picked = [a[i] if axis == 0 else a for a, axis in zip(args, in_axes, strict=True)]
        return gradients(*picked)

    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[one(i) for i in range(3)])
    same_bytes(jax.jit(jax.vmap(gradients, in_axes))(*args), wanted)


def test_vmap_along_other_axes_and_nested() -> None:
    """in_axes 1 and 2; an outer vmap over an inner one; a key for each example."""
    xs, ws = stack(2, X, W)

    def single(x: Any, w: Any) -> Any:
        y, back = jax.vjp(fp4.dot, x, w)
        return y, *back(y)

    moved = [jnp.moveaxis(xs, 0, 1), jnp.moveaxis(ws, 0, 2)]
    same_bytes(jax.vmap(single, (1, 2))(*moved), loop(single, xs, ws))
    nested = jax.jit(jax.vmap(jax.vmap(single, (0, None)), (None, 0)))(xs, ws)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        same_bytes(jax.tree.map(lambda v, i=i, j=j: v[i, j], nested), single(xs[j], ws[i]))
    keys = jax.random.split(jax.random.key(0), 2)

    def keyed(x: Any, key: Any) -> Any:
        return jax.grad(lambda v: fp4.dot(v, W, key=key).sum())(x)

    same_bytes(jax.vmap(keyed)(xs, keys), loop(keyed, xs, keys))
    same_bytes(jax.vmap(keyed, (None, 0))(X, keys), jnp.stack([keyed(X, k) for k in keys]))


def test_vmap_over_an_axis_of_size_zero() -> None:
    """An empty batch gives empty results of the right shape, as jnp does."""
    empty = jnp.zeros((0, 5, 48))
    assert jax.vmap(fp4.dot, (0, None))(empty, W).shape == (0, 5, 33)
    assert jax.vmap(fp4.quantize)(empty).shape == (0, 5, 48)
    assert jax.vmap(jax.grad(lambda x: fp4.dot(x, W).sum()))(empty).shape == (0, 5, 48)


# ---- Control flow and remat ----------------------------------------------------------------------


def test_scan_equals_a_loop() -> None:
    """Layers scanned forward and backward, weights stacked: the bytes of the unrolled loop."""
    (ws,) = stack(3, gaussian(5, (48, 48)))

    def scanned(x: Any, ws: Any) -> Any:
        return jax.lax.scan(lambda h, w: (fp4.dot(h, w), None), x, ws)[0]

    def unrolled(x: Any, ws: Any) -> Any:
        for w in ws:
            x = fp4.dot(x, w)
        return x

    x = X.astype(jnp.float32)
    results = []
    for function in (scanned, unrolled):
        y, back = jax.vjp(function, x, ws)
        results.append((y, *back(y)))
    same_bytes(*results)
    _, stacked = jax.lax.scan(lambda c, w: (c, quantized(w)), 0, ws)
    same_bytes(stacked, loop(quantized, ws))


def test_while_cond_and_map() -> None:
    """Inside every other kind of control flow."""
    wanted = fp4.dot(fp4.dot(X, W), V)
    got = jax.lax.while_loop(
        lambda s: s[0] < 1, lambda s: (s[0] + 1, fp4.dot(fp4.dot(X, W), V)), (0, wanted * 0)
    )[1]
    same_bytes(got, wanted)
    branch = jax.jit(
        lambda p: jax.lax.cond(p, lambda: gradients(X, W, V), lambda: gradients(X, -W, V))
    )
    same_bytes(branch(True), gradients(X, W, V))
    same_bytes(branch(False), gradients(X, -W, V))
    (xs,) = stack(3, X)
    same_bytes(jax.lax.map(quantized, xs), loop(quantized, xs))


def primitives(jaxpr: Any) -> Counter[str]:
    """How often each primitive of ours stands in a jaxpr and those inside it."""
    counts: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name.removeprefix("jax_fp4_")] += 1
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            counts += primitives(inner)
    return Counter({name: counts[name] for name in TARGETS if counts[name]})


def test_remat_with_the_named_policy_quantizes_nothing_twice() -> None:
    """One quantize an operand in the jaxpr, as without remat; everything is saved quantized."""
    y = gaussian(6, (19, 33))

    def loss(x: Any, w: Any) -> Any:
        return (fp4.dot(x, w) * y).sum()

    def count(function: Any) -> Counter[str]:
        return primitives(jax.make_jaxpr(jax.grad(function, (0, 1)))(X, W).jaxpr)

    saved = count(jax.checkpoint(loss, policy=POLICY))
    assert saved["quantize"] == count(loss)["quantize"] == 3  # x, w and dy
    assert saved["amax"] == count(loss)["amax"]
    assert count(jax.checkpoint(loss))["quantize"] > 3  # the count sees what it should


def test_remat_changes_no_bit() -> None:
    """Recomputed quantized copies and random bits are those of the first pass."""
    wanted = jax.jit(gradients)(X, W, V)
    for options in ({}, {"policy": POLICY}, {"prevent_cse": False}):

        def run(x: Any, w: Any, v: Any, options: Any = options) -> Any:
            y, back = jax.vjp(jax.checkpoint(layers, **options), x, w, v)
            return y, *back(y)

        same_bytes(run(X, W, V), wanted)
        same_bytes(jax.jit(run)(X, W, V), wanted)


def test_saved_residuals_are_the_quantized_copies() -> None:
    """Between the passes live packed codes and scales, not the operands."""
    y, back = jax.vjp(lambda x, w: fp4.dot(x, w), X.astype(jnp.float32), W)
    big = [leaf for leaf in jax.tree.leaves(back) if getattr(leaf, "size", 0) > 100]
    assert big and all(leaf.dtype == jnp.uint8 for leaf in big)
    del y


# ---- Several uses of one program -----------------------------------------------------------------


def test_equal_seeds_give_equal_bytes_in_one_program_and_others_differ() -> None:
    """XLA may merge equal calls, and must not merge calls that differ in their key only."""
    k1, k2 = jax.random.split(jax.random.key(5))

    @jax.jit
    def three(x: Any) -> Any:
        return [fp4.quantize(x, rounding="stochastic", key=k).values for k in (k1, k1, k2)]

    first, again, other = three(W)
    same_bytes(first, again)
    assert (np.asarray(first) != np.asarray(other)).mean() > 0.2


def test_two_threads_equal_one() -> None:
    """Two compiled programs run at once on one device, many times; no state is shared."""
    functions = [jax.jit(gradients), jax.jit(lambda x, w, v: gradients(x * 2, w, v))]
    wanted = [f(X, W, V) for f in functions]

    def work(i: int) -> Any:
        return [functions[i % 2](X, W, V) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, results in enumerate(pool.map(work, range(8))):
            for result in results:
                same_bytes(result, wanted[i % 2])


def test_recipes_of_two_threads_do_not_mix() -> None:
    """The default recipe is per thread."""

    def work(recipe: fp4.Recipe) -> Any:
        with fp4.use_recipe(recipe):
            return [fp4.dot(X, W) for _ in range(10)]

    names = ["MXFP4", "FP8"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, results in zip(
            names, pool.map(work, [fp4.RECIPES[n] for n in names]), strict=True
        ):
            for result in results:
                same_bytes(result, fp4.dot(X, W, recipe=fp4.RECIPES[name]))


# ---- Export and compilation cache ----------------------------------------------------------------


def test_exported_programs_come_back() -> None:
    """jax.export to bytes and back, gradients included; without the named checks JAX refuses."""
    exported = jax.export.export(jax.jit(gradients), disabled_checks=CHECKS)(X, W, V)
    restored = jax.export.deserialize(exported.serialize())
    same_bytes(restored.call(X, W, V), jax.jit(gradients)(X, W, V))
    q = fp4.quantize(X)
    exported = jax.export.export(
        jax.jit(lambda *leaves: fp4.dequantize(jax.tree.unflatten(jax.tree.structure(q), leaves))),
        disabled_checks=CHECKS,
    )(*jax.tree.leaves(q))
    same_bytes(
        jax.export.deserialize(exported.serialize()).call(*jax.tree.leaves(q)), fp4.dequantize(q)
    )
    with pytest.raises(ValueError, match="jax_fp4_amax"):
        jax.export.export(jax.jit(gradients))(X, W, V)


def test_every_registered_target_is_called_by_its_name() -> None:
    """Each handler is found under its name on the CPU; a wrong name is a clean error."""
    q = fp4.quantize(X)
    text = jax.jit(lambda x: fp4.dequantize(fp4.quantize(x))).lower(X).as_text()
    assert "@jax_fp4_amax" in text and "@jax_fp4_quantize" in text and "@jax_fp4_dequantize" in text
    assert "@jax_fp4_scaled_matmul" in jax.jit(fp4.scaled_matmul).lower(q, q).as_text()
    wrong = jax.ffi.ffi_call("jax_fp4_quantise", jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="jax_fp4_quantise"):
        wrong()


def test_handlers_check_what_they_are_given() -> None:
    """Operands that do not fit together fail in the handler, with the shape in the message."""
    call = jax.ffi.ffi_call("jax_fp4_dequantize", jax.ShapeDtypeStruct((1, 2, 32), jnp.float32))
    operand = "element=e2m1 scale=ue4m3 block=16 layout=linear"
    values, scales, one = (
        jnp.zeros((1, 2, 16), jnp.uint8),
        jnp.zeros((1, 2, 2), jnp.uint8),
        jnp.ones(1),
    )
    call(values, scales, one, operand=operand, k=np.int64(32))
    bad = [
        ((values[..., :8], scales, one), operand, 32, r"q\.values.*\(1, 2, 8\).*\(1, 2, 16\)"),
        ((values, scales[..., :1], one), operand, 32, r"q\.scales.*\(1, 2, 1\).*\(1, 2, 2\)"),
        ((values, scales, one), operand + " layout=tiled", 32, "twice: layout"),
        ((values, scales, one), operand.replace("linear", "x"), 32, "layout"),
        ((values, scales, one), operand + " color=3", 32, "color"),
        ((values, scales, one), operand.replace("e2m1", "e9m9"), 32, "element"),
        ((values, scales), operand, 32, "global_scale is missing"),
        ((values, scales, one, one), operand, 32, "too many operands"),
    ]
    for operands, attribute, k, message in bad:
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(*operands, operand=attribute, k=np.int64(k))


def test_the_handler_of_groups_checks_what_it_is_given() -> None:
    """Whole tiles, a group for each, a scale for each group; numbers may be anything."""
    operand = "element=e2m1 scale=ue4m3 block=16 layout=linear"
    a, b = jnp.full((1, 256, 32), 0x22, jnp.uint8), jnp.full((2, 5, 32), 0x22, jnp.uint8)
    scales = [jnp.full((*v.shape[:2], 4), 0x38, jnp.uint8) for v in (a, b)]  # codes and scales: 1
    ones, where = jnp.array([1.0, 2.0]), jnp.array([[1, 0xFFFF_FFFF]], jnp.uint32)

    def call(
        out: tuple[int, ...] = (1, 256, 5), ones: Any = ones, where: Any = where, **more: Any
    ) -> Any:
        given = {"a": operand, "b": operand, "k": 64, "groups": 2, "grouping": "rows"} | more
        given |= {name: np.int64(given[name]) for name in ("k", "groups")}
        target = jax.ffi.ffi_call("jax_fp4_grouped_matmul", jax.ShapeDtypeStruct(out, jnp.float32))
        return target(a, scales[0], ones, b, scales[1], ones, where, **given)

    assert (np.asarray(call())[0, :128] == 64 * 4).all()
    for arguments, message in (
        ({"grouping": "columns"}, "groups of rows or of k"),
        ({"groups": 0}, "at least one"),
        ({"grouping": "k", "out": (2, 256, 5)}, "whole tiles of 128"),
        ({"groups": 3}, "2 matrices of b, expected 3"),
        ({"ones": ones[:1]}, "1 global scales of a, expected 2"),
        ({"where": where[:, :1]}, r"groups has shape \(1, 1\), expected \(1, 2\)"),
        ({"out": (1, 256, 4)}, r"out has shape \(1, 256, 4\), expected \(1, 256, 5\)"),
        ({"b": operand.replace("ue4m3 block=16", "ue8m0 block=32")}, "b.scales has shape"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(**arguments)


CACHE_SCRIPT = textwrap.dedent("""
    import sys, jax, jax.numpy as jnp, jax_fp4 as fp4
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    f = jax.jit(jax.grad(lambda x, w: fp4.dot(x, w).sum(), (0, 1)))
    f.lower(jnp.ones((8, 32)), jnp.ones((32, 8))).compile()
    print(sum(n == "/jax/compilation_cache/cache_hits" for n in hits),
          sum(n == "/jax/compilation_cache/cache_misses" for n in hits))
""")


def test_the_persistent_compilation_cache_hits(tmp_path: Path) -> None:
    """The second process finds the first one's program: no address or callback is in it."""
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CACHE_SCRIPT, str(tmp_path)],
            capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        counts.append([int(n) for n in done.stdout.split()])
    assert counts[0][1] > 0
    assert counts[1][0] > 0 and counts[1][1] == 0


def test_other_platforms_are_refused_with_the_way_out() -> None:
    """Lowering for a platform that has no implementation names it and says what to do."""
    with pytest.raises(ValueError, match=r"jax_fp4.*rocm.*(CPU|cpu)"):
        jax.jit(fp4.dot).trace(X, W).lower(lowering_platforms=("rocm",))


def test_a_program_for_gpus_is_lowered_without_one() -> None:
    """The custom calls are there, the product's with its workspace as one more result."""
    text = jax.jit(fp4.dot).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
    for target in ("jax_fp4_amax", "jax_fp4_quantize", "jax_fp4_scaled_matmul"):
        assert f"@{target}(" in text
    (call,) = [line for line in text.splitlines() if "@jax_fp4_scaled_matmul(" in line]
    assert call.rpartition("->")[2].count("tensor<") == 2
