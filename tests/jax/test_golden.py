"""The golden quantizer and product vectors through the public API, eagerly and under jit.

Contract: the bytes of tests/golden/golden.npz (made by an independent reference, see its README) at
every CPU level, and the golden product within the bound of docs/numerics.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _native
from oracles import gemm, quantizer, tables

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "golden.npz")
VARIANTS = sorted({key.rsplit("/", 1)[0] for key in GOLDEN.files if key.count("/") == 3})
MX_FORMATS = {
    "e2m1": fp4.MXFP4,
    "e2m3": fp4.MXFP6_E2M3,
    "e3m2": fp4.MXFP6_E3M2,
    "e4m3": fp4.MXFP8_E4M3,
    "e5m2": fp4.MXFP8_E5M2,
}
_ORDER = ["model", "portable", "avx2", "avx512", "avx512_bf16", "amx"]
# Higher levels cannot run on this processor; `doctor` says which one it has.
LEVELS = _ORDER[: _ORDER.index(fp4.best_cpu_level()) + 1]

# One compilation an option set, not one a case.
quantize_jit = jax.jit(
    fp4.quantize,
    static_argnames=("format", "axis", "scaling", "rounding", "stream", "hadamard", "scale_rule"),
)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Any:
    """Each CPU level in turn."""
    _native.force_cpu_level(request.param)
    yield request.param
    _native.force_cpu_level("")


def golden_input(case: str) -> jax.Array:
    """x of a case, with its exact bits."""
    distribution, dtype, _ = case.split("/")
    x = GOLDEN[f"{distribution}/{dtype}/x"]
    return (
        jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.bfloat16)
        if dtype == "bf16"
        else jnp.asarray(x)
    )


def options(case: str) -> tuple[fp4.Format, dict[str, Any]]:
    """Format and keywords of `quantize` for a case."""
    variant = case.split("/")[2]
    if variant.startswith("mx_"):
        _, element, rule = variant.split("_")
        return MX_FORMATS[element], {"scale_rule": rule}
    return fp4.NVFP4, {
        "nvfp4_row": {},
        "nvfp4_col": {"axis": 0},
        "nvfp4_row2d": {"scaling": "2d"},
        "nvfp4_col2d": {"scaling": "2d", "axis": 0},
        "nvfp4_row_sr": {"rounding": "stochastic"},
        "nvfp4_col_rht": {"axis": 0, "hadamard": True},
    }[variant]


@pytest.mark.parametrize("case", VARIANTS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_quantize_gives_the_golden_bytes(case: str, jit: bool, level: str) -> None:
    """Codes, scales and amax of every golden case, byte for byte."""
    format, keywords = options(case)
    if "rounding" in keywords:
        seed = int(GOLDEN[f"{case}/seed"])
        keywords["stream"] = int(GOLDEN[f"{case}/stream"])
        keywords["seed"] = jnp.array([seed & 0xFFFF_FFFF, seed >> 32], jnp.uint32)
    q = (quantize_jit if jit else fp4.quantize)(golden_input(case), format=format, **keywords)
    codes = q.values if format.bits == 4 else q.codes()
    np.testing.assert_array_equal(np.asarray(codes), GOLDEN[f"{case}/codes"])
    np.testing.assert_array_equal(np.asarray(q.scales), GOLDEN[f"{case}/scales"])
    if f"{case}/amax" in GOLDEN.files:
        expected = np.float32(GOLDEN[f"{case}/amax"])
        assert np.asarray(q.amax).view(np.uint32) == expected.view(np.uint32)


@pytest.mark.parametrize("out", ["f32", "bf16"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_scaled_matmul_gives_the_golden_product(out: str, jit: bool, level: str) -> None:
    """Every element within the bound derived from the exact sum, as the golden one is."""
    names = ("normal", "lognormal")
    x, w = (GOLDEN[f"{name}/f32/x"] for name in names)
    golden = GOLDEN[f"gemm/normal_x_lognormal_{out}/y"]
    golden = tables.bf16_to_f32(golden) if out == "bf16" else golden
    a, b = (quantizer.quantize(v, "NVFP4") for v in (x, w))
    exact = gemm.exact_product(a.values(), b.values())
    alpha = float(np.float32(a.global_scale) * np.float32(b.global_scale))
    once = gemm.round_to(out, np.float32(alpha) * exact.rounded_to_f32())
    np.testing.assert_array_equal(golden, once)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        dtype = jnp.float32 if out == "f32" else jnp.bfloat16
        return fp4.scaled_matmul(fp4.quantize(x), fp4.quantize(w), out_dtype=dtype)

    got = np.asarray((jax.jit(product) if jit else product)(jnp.asarray(x), jnp.asarray(w)))
    got = tables.bf16_to_f32(got.view(np.uint16)) if out == "bf16" else got
    if level == "model":
        # Tensor cores truncate the running sum at each of the K / 64 steps: docs/numerics.md
        # section 9. tests/cpu holds this level to the model bit for bit.
        steps = -(-exact.terms // 64)
        bound = alpha * exact.magnitude * steps * 2.0**-22
        rounding = 2.0**-8 if out == "bf16" else 2.0**-23
        assert (np.abs(got - golden) <= bound + np.abs(golden) * rounding).all()
    else:
        gemm.output_interval(exact, alpha=alpha, out=out).require(got)


def test_every_golden_array_is_compared() -> None:
    """A key that no test reads would be a silent gap."""
    read = {
        f"{case}/{field}"
        for case in VARIANTS
        for field in ("codes", "scales", "amax", "seed", "stream")
    }
    rest = [key for key in GOLDEN.files if key not in read and not key.endswith("/x")]
    assert all(key.startswith("gemm/") or key.endswith("col_rht/rotated") for key in rest), rest
    assert len(VARIANTS) == 309
