"""Checks on eight fake devices, run in a process of their own: `python sharding_checks.py KIND`.

KIND is the type of the mesh's axes, "explicit" or "auto". Prints one JSON object: for each function
named check_* the text of its failure, or "".
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.export
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4
from jax_fp4 import product, sharding

# (axes of the mesh, spec of x [M, K], spec of w [K, N])
PLACES = {
    "data": ({"d": 8}, P("d"), P()),
    "fsdp": ({"d": 8}, P("d"), P("d")),
    "fsdp over N": ({"d": 8}, P("d"), P(None, "d")),
    "column parallel": ({"d": 4, "t": 2}, P("d"), P("d", "t")),
    "row parallel": ({"d": 4, "t": 2}, P("d", "t"), P("t", "d")),
    "two axes split K": ({"d": 4, "t": 2}, P(None, ("d", "t")), P(("d", "t"))),
}


def array(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


X, W, DY = array(1, 256, 512), array(2, 512, 256), array(3, 256, 256)


class Mesh:
    """A mesh in force, and arrays on it."""

    def __init__(self, kind: str, axes: dict[str, int]) -> None:
        which = AxisType.Explicit if kind == "explicit" else AxisType.Auto
        self.mesh = jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=(which,) * len(axes)
        )

    def __enter__(self) -> Mesh:
        self.context = jax.set_mesh(self.mesh)
        self.context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.context.__exit__(*raised)

    def put(self, x: jax.Array, spec: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(self.mesh, spec))


def same(got: Any, wanted: Any, what: str) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        a, b = np.asarray(jax.device_get(a)), np.asarray(jax.device_get(b))
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), what


def close(got: Any, wanted: Any, what: str) -> None:
    """Sums in another order: float32 sums of at most 512 products, then one rounding to bf16."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(jax.device_get(x)).astype(np.float64) for x in (a, b))
        scale = np.abs(b).max()
        assert a.shape == b.shape and np.all(np.abs(a - b) <= 2.0**-7 * np.abs(b) + 1e-4 * scale), (
            what,
            np.abs(a - b).max(),
            scale,
        )


# ---- Bytes ---------------------------------------------------------------------------------------

QUANTIZED: list[Callable[[jax.Array], Any]] = [
    fp4.quantize,
    lambda x: fp4.quantize_both(
        x,
        rounding="stochastic",
        seed=jnp.array([7, 9], jnp.uint32),
        row={"stream": 1},
        col={"hadamard": True},
    ),
    lambda x: fp4.quantize(x, scaling="2d", axis=0),
    lambda x: fp4.quantize(x, fp4.MXFP6_E2M3),
]


def check_quantize_gives_the_bytes_of_one_device(kind: str) -> None:
    every = jax.jit(lambda x: [f(x) for f in QUANTIZED])
    wanted = jax.device_get(every(X))
    for name, (axes, spec, _) in PLACES.items():
        with Mesh(kind, axes) as mesh:
            same(every(mesh.put(X, spec)), wanted, name)


def operands_of_dot(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    """(quantized operands of the three products, y, dx, dw) of dot(x, w)."""
    taken: list[Any] = []
    original = product.multiply

    def multiply(a: Any, b: Any, *rest: Any, **keywords: Any) -> jax.Array:
        taken.extend((a, b))
        return original(a, b, *rest, **keywords)

    lhs, rhs = product.sides(fp4.recipes.NVFP4, False, "cols", "rows")
    out = sharding.of_product(x[None], w[None], ("cols", "rows"))
    spec = product.Product(lhs, rhs, "bfloat16", out)
    product.multiply = multiply
    try:
        y, saved = product._product_fwd(x[None], w[None], None, None, spec)
        dx, dw, *_ = product._product_bwd(spec, saved, dy[None])
    finally:
        product.multiply = original
    return taken, (y, dx, dw)


def bytes_of(operands: Any) -> Any:
    """Values, linear scales and global scales, on the host."""
    return [
        (q.values, jax.tree.map(jnp.asarray, q).linear_scales(), q.global_scale)
        for q in jax.device_get(operands)
    ]


def check_dot_has_the_operands_of_one_device(kind: str) -> None:
    operands, results = jax.jit(operands_of_dot)(X, W, DY)
    wanted = bytes_of(operands)
    for name, (axes, x_spec, w_spec) in PLACES.items():
        with Mesh(kind, axes) as mesh:
            placed = mesh.put(X, x_spec), mesh.put(W, w_spec), mesh.put(DY, P(x_spec[0]))
            got, sums = jax.jit(operands_of_dot)(*placed)
            got, sums = jax.device_get((got, sums))
        same(bytes_of(got), wanted, name)
        close(sums, results, name)


# ---- Collectives ---------------------------------------------------------------------------------

TOKENS, WIDTH, HIDDEN, HEADS = 1024, 256, 512, 4
WEIGHTS = {
    "q": ((WIDTH, WIDTH), P("f", "t")),
    "k": ((WIDTH, WIDTH), P("f", "t")),
    "v": ((WIDTH, WIDTH), P("f", "t")),
    "o": ((WIDTH, WIDTH), P("t", "f")),
    "up": ((WIDTH, HIDDEN), P("f", "t")),
    "down": ((HIDDEN, WIDTH), P("t", "f")),
}


def block(dot: Callable[..., jax.Array], x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """A transformer block; x [batch, sequence, WIDTH]."""

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)

    h = norm(x)
    q, k, v = (heads(dot(h, w[name])) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    weights = jax.nn.softmax(scores / math.sqrt(WIDTH // HEADS)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    x = x + dot(mixed.reshape(x.shape), w["o"])
    return x + dot(jax.nn.gelu(dot(norm(x), w["up"])), w["down"])


_GATHER = re.compile(r"= (\(?[^=]*?\)?) all-gather(?:-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


def gathers(
    kind: str, dot: Callable[..., jax.Array], step: bool
) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of what the block, or a training step of it, gathers on 4 x 2 devices."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return (block(dot, x, w).astype(jnp.float32) ** 2).sum()

    with Mesh(kind, {"f": 4, "t": 2}) as mesh:
        w = {name: mesh.put(array(5, *shape), spec) for name, (shape, spec) in WEIGHTS.items()}
        x = mesh.put(array(6, 8, TOKENS // 8, WIDTH), P("f"))
        shardings = jax.tree.map(lambda a: a.sharding, (w, x))
        if step:
            run = jax.jit(jax.grad(loss, (0, 1)), out_shardings=shardings)
        else:
            run = jax.jit(lambda w, x: block(dot, x, w), out_shardings=shardings[1])
        text = run.lower(w, x).compile().as_text()
    return [
        (dtype, tuple(int(n) for n in shape.split(",") if n))
        for results in _GATHER.findall(text)
        for dtype, shape in _SHAPE.findall(results)
    ]


def check_weights_are_gathered_in_four_bits(kind: str) -> None:
    """No gather but of codes and scales, in 0.35 of the bytes that bf16 weights are.

    A training step gathers every weight twice, once for each orientation. XLA's bf16 block gathers
    once and keeps the whole weight until the backward pass, or twice if it does not; on CPU it
    gathers bf16 as float32, so what it moves is counted here from the shapes of the weights.
    """
    theirs = gathers("auto", jnp.dot, step=False)
    whole = sum(math.prod(shape) for _, shape in theirs)
    per_device = sum(math.prod(shape) // 2 for shape, _ in WEIGHTS.values())
    assert whole == per_device, theirs  # it gathers the weights along "f", and nothing else
    for step, times in ((False, 1), (True, 2)):
        ours = gathers(kind, fp4.dot, step)
        assert ours and {dtype for dtype, _ in ours} == {"u8"}, ours
        moved = sum(math.prod(shape) for _, shape in ours)
        print(f"{kind}, step={step}: {moved} bytes, bf16 {times * 2 * whole}", file=sys.stderr)
        assert moved <= 0.35 * times * 2 * whole, (ours, theirs)


# ---- The rest of the family ----------------------------------------------------------------------


def transformed(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Value and gradients of a function, for a cotangent that does not depend on the value."""

    def run(*args: jax.Array) -> Any:
        y, pull = jax.vjp(function, *args)
        wave = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
        return y, pull(y * 0 + wave)

    return run


def dot_of_quantized_weight(x: jax.Array, w: jax.Array) -> jax.Array:
    return fp4.dot(x, fp4.quantize_weight(w))


def scanned(x: jax.Array, ws: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jax.checkpoint(fp4.dot)(h, w), None), x, ws)[0]


def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    return fp4.ragged_dot(x, w, jnp.array([130, 0, 60]))


FAMILY: dict[str, tuple[Callable[..., Any], list[tuple[tuple[int, ...], Any]]]] = {
    "leading dimensions": (fp4.dot, [((4, 64, 128), P("d", "t")), ((128, 256), P("d", "t"))]),
    "experts": (
        lambda x, w: fp4.einsum("ecd,edf->ecf", x, w),
        [((4, 64, 128), P("d")), ((4, 128, 256), P("d", None, "t"))],
    ),
    "blocks that shards would cut": (fp4.dot, [((12, 40), P("d", "t")), ((40, 24), P("t", "d"))]),
    "vmap over shards": (
        jax.vmap(fp4.dot),
        [((4, 64, 128), P("d")), ((4, 128, 64), P("d", None, "t"))],
    ),
    "vmap of shards": (
        jax.vmap(fp4.dot, in_axes=(0, None)),
        [((3, 64, 128), P(None, "d")), ((128, 64), P("d", "t"))],
    ),
    "scan and remat": (scanned, [((64, 128), P("d")), ((3, 128, 128), P(None, "d"))]),
    "quantized weight": (
        dot_of_quantized_weight,
        [((64, 128), P("d")), ((128, 128), P("d", "t"))],
    ),
    "groups": (grouped, [((200, 128), P("d")), ((3, 128, 512), P(None, "t", "d"))]),
    "groups, vmap over shards": (
        jax.vmap(grouped),
        [((4, 200, 64), P("d")), ((4, 3, 64, 32), P("d", None, "t"))],
    ),
    "unquantized": (
        lambda x, w: fp4.dot(x, w, recipe=fp4.recipes.BF16),
        [((64, 128), P("d")), ((128, 128), P("d", "t"))],
    ),
}


def check_family_agrees_with_one_device(kind: str) -> None:
    for name, (function, operands) in FAMILY.items():
        arrays = [array(i, *shape) for i, (shape, _) in enumerate(operands)]
        run = transformed(function)
        wanted = jax.device_get(jax.jit(run)(*arrays))
        meshes = [{"d": 4, "t": 2}]
        if name == "leading dimensions":  # an axis that is left stays Explicit around the sums
            meshes.append({"d": 2, "t": 2, "unused": 2})
        for axes in meshes:
            with Mesh(kind, axes) as mesh:
                placed = [mesh.put(a, spec) for a, (_, spec) in zip(arrays, operands, strict=True)]
                y, gradients = jax.jit(transformed(function))(*placed)
                if kind == "explicit":
                    for gradient, x in zip(gradients, placed, strict=True):
                        assert jax.typeof(gradient) == jax.typeof(x), name
                close((y, gradients), wanted, f"{name} on {axes}")


def check_export_says_what_to_do(kind: str) -> None:
    """Explicit meshes export; automatic ones are refused with the way out."""
    with Mesh(kind, {"d": 8}) as mesh:
        x, w = mesh.put(X, P("d")), mesh.put(W, P())
        calls = ("amax", "quantize", "scaled_matmul")
        checks = [jax.export.DisabledSafetyCheck.custom_call(f"jax_fp4_{c}") for c in calls]
        export = jax.export.export(jax.jit(fp4.dot), disabled_checks=checks)
        if kind == "explicit":
            same(export(x, w).call(x, w), jax.jit(fp4.dot)(x, w), kind)
            return
        try:
            export(x, w)
        except ValueError as error:
            assert "Explicit" in str(error), error
        else:
            raise AssertionError("exported for an automatic mesh")


def check_compile_cache_hits_in_another_process(kind: str) -> None:
    """A second process finds what the first one compiled."""
    script = (
        "import sys; sys.argv = ['', 'none']; from support.sharding_checks import *\n"
        "names = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: names.append(name))\n"
        f"with Mesh({kind!r}, {{'d': 8}}) as mesh:\n"
        "    jax.jit(fp4.dot)(mesh.put(X, P('d')), mesh.put(W, P('d')))\n"
        "print(*(n.split('/')[-1] for n in names if 'compilation_cache/cache_' in n))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        said = [
            subprocess.run(
                [sys.executable, "-c", script],
                env={**os.environ, **settings},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for _ in range(2)
        ]
    assert "cache_misses" in said[0], said
    assert "cache_hits" in said[1] and "cache_misses" not in said[1], said


def main(kind: str) -> dict[str, str]:
    outcomes = {}
    for name, check in list(globals().items()):
        if name.startswith("check_") and (len(sys.argv) < 3 or re.search(sys.argv[2], name)):
            try:
                check(kind)
                outcomes[name] = ""
            except Exception:
                outcomes[name] = traceback.format_exc()[-3000:]
    return outcomes


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
