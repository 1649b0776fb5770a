"""Random operands of products, and what the cases of `gemm` and `dot` share.

Activations are new for every sample. There are two sets of weights, used in turn, or one where that
would take too much memory: between two uses the probes have copied more than the caches hold.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4.cli.bench import check, conditions
from jax_fp4.cli.bench.check import Oracle
from jax_fp4.cli.bench.measure import Case, Peer
from jax_fp4.cli.bench.shapes import Product

_WEIGHT_SETS = 2


class Inputs:
    """Random operands of one product, bfloat16: standard normal, so that no code is rare."""

    def __init__(self, product: Product) -> None:
        """Args: product: whose operands these are."""
        self.product = product
        m, n, k = product.m, product.n, product.k
        large = 2 * n * k * _WEIGHT_SETS > conditions.available_memory() / 16
        self.sets = 1 if large else _WEIGHT_SETS
        self.weights = [self._normal(("weight", i), n, k) for i in range(self.sets)]
        self._seen: dict[int, check.Rows] = {}
        self.activations = functools.lru_cache(2)(lambda s: self._normal(("x", s), m, k))
        self.gradients = functools.lru_cache(2)(lambda s: self._normal(("dy", s), m, n))

    def _normal(self, name: tuple[str, int], rows: int, columns: int) -> jax.Array:
        seed = [ord(name[0][0]), name[1], rows, columns]
        x = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
        return jnp.asarray(x, jnp.bfloat16)

    def weight(self, s: int, sets: Sequence[Any] | None = None) -> Any:
        """The weight of input set s, or what was made of it."""
        return (self.weights if sets is None else sets)[s % self.sets]

    def each(self, make: Callable[[jax.Array], Any], bytes_each: float) -> list[Any]:
        """``make`` of every weight.

        Args:
            make: of [N, K] bfloat16.
            bytes_each: of what it makes.

        Raises:
            MemoryError: if a third of the memory would not hold them.
        """
        needed, free = bytes_each * self.sets, conditions.available_memory()
        if needed > free / 3:
            raise MemoryError(f"weights of {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free")
        return [jax.block_until_ready(make(weight)) for weight in self.weights]

    @functools.cached_property
    def rows(self) -> list[check.Rows]:
        """The weights for an oracle."""
        return [check.bfloat16(weight) for weight in self.weights]

    @functools.cached_property
    def exact(self) -> Oracle:
        """A B^T of the bfloat16 operands."""
        p = self.product
        return Oracle(
            (p.m, p.n),
            lambda s: (check.bfloat16_values(self.activations(s)), self.weight(s, self.rows)),
        )

    def traffic(self, a: float, b: float, d: float) -> float:
        """Bytes of one product with elements of a, b and d bytes."""
        p = self.product
        return a * p.m * p.k + b * p.n * p.k + d * p.m * p.n


def optional(name: str) -> Any:
    """A module that may be missing.

    Raises:
        ImportError: if it is not installed, saying so.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"not installed ({error})") from None


def to_torch(torch: Any, x: jax.Array) -> Any:
    """A copy of a bfloat16 array as a tensor of torch."""
    return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)


def row(
    op: str,
    case: str,
    product: Product,
    flops: float,
    peers: Sequence[tuple[str, Callable[[str], Peer]]],
) -> Case:
    """A case about a product: FLOP/s, or weights/s where it is one row times a weight."""
    makers = [(name, functools.partial(make, name)) for name, make in peers]
    if product.m == 1 and op == "gemm":
        work, unit = product.n * product.k / 1e9, "Gweight/s"
    else:
        work, unit = flops / 1e9, "GFLOP/s"
    return Case(op, case, product.label, unit, work, flops, makers)
