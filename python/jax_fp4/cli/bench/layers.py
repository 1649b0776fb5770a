"""The case `layer`: one transformer block of the demo's kind, forward and backward.

Everything but the linear layers is the same under every peer: norms, attention and GELU in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4.cli import transformer
from jax_fp4.cli.bench.check import Claim, Oracle, Parts, ProductCheck
from jax_fp4.cli.bench.dots import qwix_dot
from jax_fp4.cli.bench.measure import Case, Peer
from jax_fp4.cli.bench.shapes import Block

# Of a block's outputs and gradients, the largest: its products follow one another.
_CLAIMS = {
    "nvfp4": Claim(low=0.03, high=0.9),
    "mxfp8": Claim(low=0.008, high=0.4),
    "bfloat16": Claim(high=0.1),
    "float32": Claim(high=1e-3),
}


class _Reference(Oracle):
    """One output of the block in float32, at the places that are looked at."""

    def __init__(self, shape: tuple[int, int], output: Callable[[int], np.ndarray]) -> None:
        super().__init__(shape, lambda s: (np.zeros((0, 0)), None))  # type: ignore[return-value]
        self._output = output

    def parts(self, indices: Any) -> dict[int, Parts]:
        found = {}
        for index in indices:
            rows, columns = self.places(index)
            whole = self._output(index)
            found[index] = Parts(
                rows, columns, whole[rows], whole[:, columns].T, np.empty(0), np.empty(0)
            )
        return found


def layer(block: Block) -> Case:
    """A block with one sequence."""
    size = transformer.Size(
        block.width, 1, block.hidden, block.heads, block.tokens, 1, learning_rate=0.0
    )

    @functools.cache
    def weights() -> Any:
        # Larger than a training starts with: what the block adds is then as large as what goes by
        # it, and an error in it can be seen.
        random = np.random.default_rng(block.width)

        def normal(k: int, n: int) -> jax.Array:
            return jnp.asarray(random.standard_normal((k, n), np.float32) * np.float32(k**-0.5))

        d, f = block.width, block.hidden
        return {
            "attention_norm": jnp.ones(d),
            "mlp_norm": jnp.ones(d),
            "qkv": normal(d, 3 * d),
            "out": normal(d, d),
            "up": normal(d, f),
            "down": normal(f, d),
        }

    @functools.lru_cache(2)
    def tokens(s: int) -> tuple[jax.Array, jax.Array]:
        random = np.random.default_rng([s, block.width])
        shape = (2, 1, block.tokens, block.width)
        x, dy = jnp.asarray(random.standard_normal(shape, np.float32))
        return x, dy

    def step(linear: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def function(params: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, pull = jax.vjp(lambda p, x: transformer.block(p, x, size, linear)[0], params, x)
            dparams, dx = pull(dy)
            return [y[0], dx[0], *(dparams[name] for name in transformer.LINEAR)]

        return jax.jit(function)

    exact = step(lambda x, w: jnp.dot(x, w, precision="highest"))

    @functools.lru_cache(1)
    def results(s: int) -> list[np.ndarray]:
        x, dy = tokens(s)
        return [np.asarray(output) for output in exact(weights(), x, dy)]

    d, f = block.width, block.hidden
    shapes = [(block.tokens, d), (block.tokens, d), (d, 3 * d), (d, d), (d, f), (f, d)]
    oracles = [
        _Reference(shape, functools.partial(lambda number, s: results(s)[number], number))
        for number, shape in enumerate(shapes)
    ]

    def peer(name: str, make: Callable[[], Callable[[Any, Any], Any]], format: str) -> Peer:
        return Peer(
            name,
            lambda s: (weights(), *tokens(s)),
            step(make()),
            ProductCheck(oracles, _CLAIMS[format], list),
            # float32 weights read, and their gradients written.
            8.0 * block.weights,
            ours=name.startswith("jax_fp4"),
        )

    def bfloat16(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    def qwix() -> Callable[[Any, Any], Any]:
        product = qwix_dot()
        return lambda x, w: product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))

    recipes = jax_fp4.recipes
    peers: Sequence[tuple[str, Callable[[], Any], str]] = [
        ("jax_fp4 NVFP4", lambda: transformer.Linear(recipes.NVFP4), "nvfp4"),
        ("jax_fp4 MXFP8", lambda: transformer.Linear(recipes.MXFP8), "mxfp8"),
        ("jnp.dot bf16 -> f32", lambda: bfloat16, "bfloat16"),
        ("jnp.dot f32", lambda: jnp.dot, "float32"),
        ("qwix nvfp4", qwix, "nvfp4"),
    ]
    flops = 6.0 * block.tokens * block.weights
    return Case(
        "layer", "forward + backward", block.label, "tokens/s", float(block.tokens), flops,
        [(name, functools.partial(peer, name, make, format)) for name, make, format in peers],
    )  # fmt: skip
