"""Several devices: quantize and dot inside shard_map, and dot outside of it.

Contract: on one device and on four (fake ones, in a subprocess, since the number of devices is
fixed when JAX starts), with check_vma on and off, on Auto and Explicit meshes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4
from support.jax_reference import gaussian, same_bytes

X, W = gaussian(1, (32, 48), "bfloat16"), gaussian(2, (48, 24))
DY = gaussian(3, (32, 24))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Any:
    """A mesh over all devices, one axis."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(request.param,))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=[True, False], ids=["check_vma", "no_vma"])
def shard(request: pytest.FixtureRequest, mesh: Any) -> Any:
    """A compiled shard_map of a function, called with operands placed as its specs say."""

    def make(function: Any, out_specs: Any, *specs: Any) -> Any:
        mapped = jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=request.param
            )
        )

        def call(*args: Any) -> Any:
            placed = [
                jax.device_put(a, jax.tree.map(lambda leaf, s=s: NamedSharding(mesh, s), a))
                for a, s in zip(args, specs, strict=True)
            ]
            return mapped(*placed)

        return call

    return make


def shards(x: Any) -> list[Any]:
    """What each device holds of an array that is sharded by rows."""
    return jnp.split(x, jax.device_count())


def test_quantize_is_local_unless_axes_are_named(shard: Any) -> None:
    """Each device quantizes its shard; with amax_axes all use the amax of the whole."""
    rows = P("d")
    local = shard(lambda x: fp4.quantize(x).values, rows, rows)(X)
    same_bytes(local, jnp.concatenate([fp4.quantize(x).values for x in shards(X)]))
    whole = shard(lambda x: fp4.quantize(x, amax_axes="d").values, rows, rows)(X)
    same_bytes(whole, fp4.quantize(X).values)
    back = shard(lambda x: fp4.dequantize(fp4.quantize(x, amax_axes=("d",))), rows, rows)(X)
    same_bytes(back, fp4.dequantize(fp4.quantize(X)))


def test_scaled_matmul_takes_sharded_codes_and_replicated_scales(shard: Any) -> None:
    """Codes of a sharded by rows; everything of b and the scales' global part replicated."""
    a, b = fp4.quantize(X), fp4.quantize(W, axis=0)

    def local(values: Any, scales: Any, global_scale: Any, b: Any) -> Any:
        rows = values.shape[0]
        mine = jax.lax.dynamic_slice_in_dim(scales, jax.lax.axis_index("d") * rows, rows)
        q = fp4.BlockScaledArray(
            values, mine, global_scale, None, a.format, -1, "linear", 48, a.dtype
        )
        return fp4.scaled_matmul(q, b)

    got = shard(local, P("d"), P("d"), P(), P(), P())(a.values, a.scales, a.global_scale, b)
    same_bytes(got, fp4.scaled_matmul(a, b))


@pytest.mark.parametrize("recipe", ["NVFP4", "BF16"])
@pytest.mark.parametrize("keyed", [False, True], ids=["data", "key"])
def test_gradients_are_local_and_weights_sum_over_devices(
    shard: Any, recipe: str, keyed: bool, request: pytest.FixtureRequest
) -> None:
    """dx of each device is that of its own dot; dw, replicated, is the sum over the devices."""
    checked = "check_vma" in request.node.name
    key = jax.random.key_data(jax.random.key(3))

    def loss(x: Any, w: Any, dy: Any, key: Any) -> Any:
        y = fp4.dot(
            x,
            w,
            preferred_element_type=jnp.float32,
            recipe=fp4.RECIPES[recipe],
            key=key if keyed else None,
        )
        return (y * dy).sum()

    alone = jax.jit(jax.grad(loss, (0, 1)))
    wanted = [alone(x, W, dy, key) for x, dy in zip(shards(X), shards(DY), strict=True)]

    def local(x: Any, w: Any, dy: Any, key: Any) -> Any:
        dx, dw = jax.grad(loss, (0, 1))(x, w, dy, key)
        # With check_vma the sum over devices is the transpose of using w on all of them.
        return dx, dw if checked else jax.lax.psum(dw, "d")

    dx, dw = shard(local, (P("d"), P()), P("d"), P(), P("d"), P())(X, W, DY, key)
    same_bytes(dx, jnp.concatenate([dx for dx, _ in wanted]))
    total = np.sum([np.asarray(dw, np.float64) for _, dw in wanted], 0)
    np.testing.assert_allclose(np.asarray(dw), total, rtol=1e-5, atol=1e-5)


def test_a_dot_under_jit_with_sharded_operands_is_right(mesh: Any) -> None:
    """Without shard_map the result is that of one device."""
    x = jax.device_put(X, NamedSharding(mesh, P("d", None)))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    same_bytes(jax.device_get(jax.jit(fp4.dot)(x, w)), jax.device_get(fp4.dot(X, W)))


@pytest.mark.parametrize(
    "x_spec, w_spec", [(P("d"), P()), (P(None, "d"), P("d")), (P(), P(None, "d"))]
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_of_sharded_operands_keep_bytes_and_sharding(
    mesh: Any, x_spec: Any, w_spec: Any, jit: bool
) -> None:
    """Rows, contracted axis or columns sharded: the bytes of one device, types of the primal."""

    def loss(x: Any, w: Any) -> Any:
        return (fp4.dot(x, w, preferred_element_type=jnp.float32) * DY).sum()

    gradient = jax.grad(loss, (0, 1))
    wanted = jax.device_get(gradient(X, W))
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((X, x_spec), (W, w_spec))]
    got = (jax.jit(gradient) if jit else gradient)(*placed)
    for mine, its, operand in zip(got, wanted, placed, strict=True):
        same_bytes(jax.device_get(mine), its)
        if mesh.axis_types == (AxisType.Explicit,):
            assert jax.typeof(mine).sharding.spec == jax.typeof(operand).sharding.spec


def test_everything_on_four_devices() -> None:
    """The tests of this file, on four fake devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "not test_everything_on_four_devices"],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
