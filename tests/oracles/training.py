"""The three matrix products of a linear layer under the NVFP4 training recipe, in float64.

y = x w, dx = dy w^T, dw = x^T dy, with both operands of each product quantized along its
contraction axis:

    product  operand  rounding    rotated  scaling
    y        x        nearest     no       1x16
             w        nearest     no       16x16
    dx       dy       stochastic  no       1x16     stream 0
             w        nearest     no       16x16
    dw       dy       stochastic  yes      1x16     stream 1
             x        nearest     yes      1x16
"""

from dataclasses import dataclass

import numpy as np

from oracles import quantizer


@dataclass(frozen=True)
class Products:
    """The results, float64."""

    y: np.ndarray  # [M, N]
    dx: np.ndarray  # [M, K]
    dw: np.ndarray  # [K, N]


def product(a: quantizer.Quantized, b: quantizer.Quantized) -> np.ndarray:
    """a [M, K] times b [N, K] transposed, times fl(global_scale_a * global_scale_b)."""
    alpha = np.float64(np.float32(a.global_scale) * np.float32(b.global_scale))
    return (a.values() @ b.values().T) * alpha


def nvfp4_products(
    x: np.ndarray,
    w: np.ndarray,
    dy: np.ndarray,
    *,
    dgrad_seed: tuple[int, int],
    wgrad_seed: tuple[int, int],
    dgrad_stream: int = 0,
    wgrad_stream: int = 1,
    stochastic: bool = True,
    hadamard: bool = True,
    weight_scaling: str = "2d",
) -> Products:
    """The recipe on float32 x [M, K], w [K, N], dy [M, N].

    Args:
        x: the layer's input.
        w: the weight, as `jnp.dot(x, w)` takes it.
        dy: the cotangent of y.
        dgrad_seed: Philox key of dy's row-wise copy.
        wgrad_seed: Philox key of dy's column-wise copy.
        dgrad_stream: stream of dy's row-wise copy.
        wgrad_stream: stream of dy's column-wise copy.
        stochastic: False rounds gradients to nearest.
        hadamard: False leaves both operands of dw unrotated.
        weight_scaling: "2d" or "1d".
    """
    rounding = "stochastic" if stochastic else "nearest"
    q = quantizer.quantize
    x_row = q(x, "NVFP4", axis=1)
    w_along_k = q(w, "NVFP4", axis=0, scaling=weight_scaling)  # [N, K]
    w_along_n = q(w, "NVFP4", axis=1, scaling=weight_scaling)  # [K, N]
    dy_row = q(dy, "NVFP4", axis=1, rounding=rounding, seed=dgrad_seed, stream=dgrad_stream)
    x_col = q(x, "NVFP4", axis=0, hadamard=hadamard)  # [K, M]
    dy_col = q(
        dy,
        "NVFP4",
        axis=0,
        rounding=rounding,
        seed=wgrad_seed,
        stream=wgrad_stream,
        hadamard=hadamard,
    )  # [N, M]
    return Products(product(x_row, w_along_k), product(dy_row, w_along_n), product(x_col, dy_col))


def relative_error(got: np.ndarray, exact: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the exact result."""
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
