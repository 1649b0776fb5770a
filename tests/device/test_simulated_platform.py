"""JAX, FFI, plan, driver and PTX end to end: the bits are those of the CPU backend."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _native
from oracles import tables
from support import driver_programs
from support.repository import ROOT

pytestmark = pytest.mark.device


def native(program: str, folder: Path) -> dict[str, np.ndarray]:
    """What the CPU backend gives, at its level `model`."""
    path = folder / "native.npz"
    environment = os.environ | {"JAX_FP4_DRIVER": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "support.driver_programs", program, str(path)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.parametrize(
    ("program", "chip", "kernels"),
    [
        ("dot", "100a", {"amax_rotated_rows_32", "quantize_mx6_32", "gemm_sm100_nvfp4_128x32"}),
        ("dot", "121a", {"amax_rotated_rows_32", "quantize_mx8_32", "gemm_sm120_nvfp4_128x32"}),
        ("ragged", "100a", {"gemm_sm100_nvfp4_128x64", "gemm_sm100_mxf8f6f4_128x64"}),
        ("ragged", "121a", {"gemm_sm120_nvfp4_128x64", "gemm_sm120_mxf8f6f4_128x64"}),
        ("training", "100a", {"gemm_sm100_nvfp4_128x64", "amax_32", "quantize_nvfp4_16"}),
    ],
)
def test_bits_are_those_of_the_cpu_backend(
    program: str, chip: str, kernels: set[str], tmp_path: Path
) -> None:
    """Products, gradients, two training steps; the kernels did run, cleanly."""
    _native.reset_sim_driver(chip, 0)
    before = _native.launch_counts()
    got = driver_programs.PROGRAMS[program]()
    ran = {
        kernel for kernel, count in _native.launch_counts().items() if count > before.get(kernel, 0)
    }
    assert kernels <= ran, f"expected launches of {sorted(kernels)}, got {sorted(ran)}"
    assert _native.sim_driver_reports() == []
    expected = native(program, tmp_path)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].tobytes() == value.tobytes(), name


def test_a_long_product_is_split_as_planned() -> None:
    """Few tiles and a long K: parts are summed in their order, each rounded once."""
    m, n, k = 64, 32, 8192
    rng = np.random.default_rng(5)
    # Integers in codes and scales of 1, so that every part is exact whatever its order.
    x = rng.integers(-2, 3, (m, k)).astype(np.float32)
    w = rng.integers(-2, 3, (n, k)).astype(np.float32)
    a = fp4.quantize(jnp.asarray(x), fp4.MXFP4)
    b = fp4.quantize(jnp.asarray(w), fp4.MXFP4)
    bias = jnp.arange(n, dtype=jnp.float32)
    got = np.asarray(fp4.scaled_matmul(a, b, bias=bias))
    assert _native.launch_counts()["gemm_reduce"] > 0
    exact = x.astype(np.int64) @ w.astype(np.int64).T + np.arange(n)
    assert (got == exact).all()


@pytest.mark.parametrize("k", [1, 31, 33, 127, 129, 200])
def test_four_bit_codes_beside_eight_bit_ones_at_any_k(k: int) -> None:
    """Rows that no tensor map can expand are padded first, scales in the public layout tiled."""
    rng = np.random.default_rng(k)
    x = rng.integers(-2, 3, (3, 5, k)).astype(np.float32)
    w = rng.integers(-2, 3, (3, 7, k)).astype(np.float32)
    a, b = fp4.quantize(jnp.asarray(x), fp4.MXFP4), fp4.quantize(jnp.asarray(w), fp4.MXFP8_E4M3)
    before = _native.launch_counts()
    got = np.asarray(fp4.scaled_matmul(a, b))
    after = _native.launch_counts()
    for kernel, launches in (("pad_rows", int(k % 128 != 0)), ("tile_scales", 2)):
        assert after.get(kernel, 0) - before.get(kernel, 0) == launches, kernel
    assert (got == np.einsum("bmk,bnk->bmn", x, w)).all()


def test_a_bias_for_each_example_and_an_empty_sum() -> None:
    """vmap over bias; K = 0 leaves alpha * 0 + bias + C."""
    x = jnp.ones((2, 4, 32), jnp.float32)
    q = fp4.quantize(x)
    biases = jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
    got = jax.vmap(lambda q, bias: fp4.scaled_matmul(q, q, bias=bias))(q, biases)
    assert (np.asarray(got) == 32 + np.arange(8).reshape(2, 1, 4)).all()
    empty = fp4.quantize(jnp.zeros((2, 3, 0), jnp.float32))
    c = jnp.full((2, 3, 3), 2.0, jnp.bfloat16)
    got = fp4.scaled_matmul(empty, empty, bias=jnp.ones(3), accumulate=c, out_dtype=jnp.float16)
    assert (tables.f16_to_f32(np.asarray(got).view(np.uint16)) == 3).all()


def test_schedules_do_not_change_a_bit() -> None:
    """Ten seeds of the machine's schedule, one result."""
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((130, 288)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((288, 136)), jnp.float32)
    results = set()
    for seed in range(10):
        _native.reset_sim_driver("103a", seed)
        results.add(np.asarray(fp4.dot(x, w)).tobytes())
        assert _native.sim_driver_reports() == []
    assert len(results) == 1
