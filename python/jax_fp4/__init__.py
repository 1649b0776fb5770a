"""Block-scaled FP4 matrix products for JAX.

`dot` stands where ``jnp.dot`` stood; `quantize` and `scaled_matmul` are its parts.
"""

import sys

__version__ = "0.1.0"

try:
    from jax_fp4._native import best_cpu_level, cpu_level
    from jax_fp4.block_array import BlockScaledArray
    from jax_fp4.dot import (
        dot,
        dot_general,
        inner,
        matmul,
        matvec,
        tensordot,
        vdot,
        vecdot,
        vecmat,
    )
    from jax_fp4.einsum import einsum
    from jax_fp4.explain import ExplainedProduct, Explanation, explain
    from jax_fp4.formats import (
        FORMATS,
        FP8_E4M3,
        FP8_E5M2,
        MXFP4,
        MXFP6_E2M3,
        MXFP6_E3M2,
        MXFP8_E4M3,
        MXFP8_E5M2,
        NVFP4,
        Format,
    )
    from jax_fp4.matmul import scaled_matmul
    from jax_fp4.quantize import dequantize, quantize, quantize_both
    from jax_fp4.ragged import ragged_dot
    from jax_fp4.recipe import RECIPES, Operand, Recipe, recipes, use_recipe
    from jax_fp4.weight import QuantizedWeight, quantize_weight, stored_weight
except ImportError:
    # While Python looks up the module of `python -m jax_fp4 doctor`, sys.argv is this; that command
    # says what is missing instead.
    if sys.argv[:2] != ["-m", "doctor"]:
        raise

__all__ = [
    "FORMATS",
    "FP8_E4M3",
    "FP8_E5M2",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "NVFP4",
    "RECIPES",
    "BlockScaledArray",
    "ExplainedProduct",
    "Explanation",
    "Format",
    "Operand",
    "QuantizedWeight",
    "Recipe",
    "best_cpu_level",
    "cpu_level",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "explain",
    "inner",
    "matmul",
    "matvec",
    "quantize",
    "quantize_both",
    "quantize_weight",
    "ragged_dot",
    "recipes",
    "scaled_matmul",
    "stored_weight",
    "tensordot",
    "use_recipe",
    "vdot",
    "vecdot",
    "vecmat",
]
