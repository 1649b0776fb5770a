"""Programs that run natively and on the simulated driver, for a comparison of their bits.

    python -m support.driver_programs training out.npz      # JAX_FP4_DRIVER as it is set

Natively the CPU level is `model`: its sums are those of the tensor cores.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4 as fp4
from jax_fp4 import _native
from jax_fp4.cli import training, transformer
from jax_fp4.grouped import multiply_groups

Arrays = dict[str, np.ndarray]


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def dot() -> Arrays:
    """Products and gradients of every recipe, at sizes that no tile divides."""
    recipes = {
        name: value for name, value in vars(fp4.recipes).items() if isinstance(value, fp4.Recipe)
    }
    result: Arrays = {}
    for name, recipe in sorted(recipes.items()):
        for m, k, n in ((96, 160, 80), (33, 50, 7)):
            x, w, dy = _normal(0, (m, k)), _normal(1, (k, n)), _normal(2, (m, n))
            y, pull = jax.vjp(lambda x, w, recipe=recipe: fp4.dot(x, w, recipe=recipe), x, w)
            dx, dw = pull(dy)
            for part, value in {"y": y, "dx": dx, "dw": dw}.items():
                result[f"{name} {m}x{k}x{n} {part}"] = np.asarray(value)
    return result


def training_steps() -> Arrays:
    """Two steps of the demo's smallest model."""
    size = transformer.SIZES["tiny"]
    params = transformer.initial_params(size, 0)
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    rng = np.random.default_rng(4)
    result: Arrays = {}
    for step in range(2):
        tokens = rng.integers(32, 127, (size.batch, size.context + 1)).astype(np.uint8)
        params, moments, loss = training._compiled_step(size, 100, fp4.recipes.NVFP4)(
            params, moments, tokens, jnp.float32(step)
        )
        result[f"loss {step}"] = np.asarray(loss)
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        result[jax.tree_util.keystr(path)] = np.asarray(value)
    return result


RAGGED_SIZES = {  # of 384 rows
    "edges of tiles": [127, 0, 128, 129, 0],
    "one row each, rows behind": [1, 0, 1, 1, 40],
    "negative, and too many": [-5, 150, -(1 << 31), 300, (1 << 31) - 1],
    "nothing": [0, 0, 0, 0, 0],
}


def ragged() -> Arrays:
    """ragged_dot, its gradients, and what its quantizers saved; sizes of every kind."""
    # NVFP4 as published; and 6- and 8-bit codes beside 4-bit ones, whose rows are padded first.
    mixed = fp4.Recipe(
        "mixed", *(fp4.Operand(f) for f in (fp4.MXFP8_E4M3, fp4.MXFP4, fp4.MXFP6_E2M3, fp4.MXFP4)),
        *(fp4.Operand(f) for f in (fp4.MXFP4, fp4.MXFP8_E5M2)),
    )  # fmt: skip
    x, w, dy = _normal(0, (384, 72)), _normal(1, (5, 72, 40)), _normal(2, (384, 40))
    result: Arrays = {}
    for recipe in (fp4.recipes.NVFP4, mixed):

        @jax.jit
        def run(sizes: jax.Array, recipe: fp4.Recipe = recipe) -> dict[str, jax.Array]:
            def product(x: jax.Array, w: jax.Array) -> jax.Array:
                return fp4.ragged_dot(x, w, sizes, recipe=recipe)

            y, pull = jax.vjp(product, x, w)
            dx, dw = pull(dy)
            saved = [leaf for leaf in jax.tree.leaves(pull) if leaf.dtype == np.uint8]
            return {"y": y, "dx": dx, "dw": dw} | {f"saved {i}": v for i, v in enumerate(saved)}

        for name, sizes in RAGGED_SIZES.items():
            made = run(jnp.array(sizes))
            result |= {f"{recipe.name} {name} {k}": np.asarray(v) for k, v in made.items()}
    # Examples of a vmap: launches of one handler after another, in parts of its arrays.
    examples = jax.jit(jax.vmap(lambda x, s: fp4.ragged_dot(x, w, s, recipe=mixed)))
    sizes = jnp.array([[3, 0, 40, 0, 100], [0, 64, 0, 128, 0]])
    result["examples"] = np.asarray(examples(x.reshape(2, 192, 72), sizes))
    return result | _groups_that_mean_nothing()


def _groups_that_mean_nothing() -> Arrays:
    """Numbers that ragged_dot would not make, given to the handler."""
    a = fp4.quantize(_normal(3, (1, 384, 256)), fp4.MXFP4)
    b = fp4.quantize(_normal(4, (3, 40, 256)), fp4.MXFP4)
    ones = (jnp.ones(3), jnp.ones(3))
    rows = jnp.array([2, 3, 0], jnp.uint32)
    by_rows = multiply_groups(a, b, ones, rows, "rows", jnp.float32)
    columns = jnp.array([200, (1 << 32) - 1, 0, 5], jnp.uint32)
    one = jax.tree.map(lambda part: part[:1], b)
    by_k = multiply_groups(a, one, ones, columns, "k", jnp.float32)
    # Rows of no group are not defined.
    return {"wild rows": np.asarray(by_rows[0, jnp.r_[:128, 256:384]]), "wild k": np.asarray(by_k)}


PROGRAMS: dict[str, Callable[[], Arrays]] = {
    "dot": dot,
    "ragged": ragged,
    "training": training_steps,
}

if __name__ == "__main__":
    if not _native.SIMULATED:
        _native.force_cpu_level("model")
    np.savez(sys.argv[2], **PROGRAMS[sys.argv[1]]())
