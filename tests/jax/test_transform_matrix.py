"""Every transformation of jax over every function: one table, no empty cell.

Contract: a transformed call gives the bits of the plain one: eager, jit and disable_jit agree; a
vmap, a scan and a map are Python loops; grad, vmap(grad) and remat give the gradients of jit(grad);
shard_map, automatic and explicit meshes change nothing; exported programs come back. What has no
gradient (quantize, scaled_matmul) says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4
from support.jax_reference import gaussian, same_bytes

TARGETS = ("amax", "quantize", "dequantize", "scaled_matmul", "grouped_matmul")
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(f"jax_fp4_{name}") for name in TARGETS]
POLICY = jax.checkpoint_policies.save_only_these_names("quantization")
SIZES = jnp.array([5, 0, 3], jnp.int32)
BATCHED = (((2,), (1,)), ((0,), (0,)))


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of two arrays whose first dimension counts rows, and its operands' shapes."""

    call: Callable[[Any, Any], Any]
    x: tuple[int, ...]
    w: tuple[int, ...]
    differentiable: bool = True

    def operands(self, count: int | None = None) -> tuple[jax.Array, jax.Array]:
        """x and w, or ``count`` different ones of each."""
        lead = () if count is None else (count,)
        return gaussian(1, (*lead, *self.x), "bfloat16"), gaussian(2, (*lead, *self.w))

    def gradients(self, x: Any, w: Any) -> Any:
        """The result and both gradients, under a cotangent that depends on the result."""
        if not self.differentiable:
            return self.call(x, w)
        y, back = jax.vjp(self.call, x, w)
        return y, *back(y)


def _codes_and_values(x: Any, w: Any) -> Any:
    return fp4.dequantize(fp4.quantize(x)), fp4.quantize(w, axis=0, hadamard=True).values


FUNCTIONS = {
    "quantize": Function(_codes_and_values, (8, 40), (40, 6), differentiable=False),
    "scaled_matmul": Function(
        lambda x, w: fp4.scaled_matmul(fp4.quantize(x), fp4.quantize(w, axis=0)),
        (8, 40), (40, 6), differentiable=False,
    ),
    "dot": Function(fp4.dot, (8, 40), (40, 6)),
    "dot_general": Function(lambda x, w: fp4.dot_general(x, w, BATCHED), (4, 3, 40), (4, 40, 5)),
    "einsum": Function(lambda x, w: fp4.einsum("ij,jk,lk->il", x, w, w[:5]), (8, 40), (40, 6)),
    "ragged_dot": Function(lambda x, w: fp4.ragged_dot(x, w, SIZES), (8, 40), (3, 40, 5)),
}  # fmt: skip

TRANSFORMS: dict[str, Callable[[Function], None]] = {}


def transform(check: Callable[[Function], None]) -> Callable[[Function], None]:
    """Puts a row into the table."""
    TRANSFORMS[check.__name__] = check
    return check


def loop(function: Any, *stacked: Any) -> Any:
    """The Python loop that a vmap stands for."""
    results = [function(*(v[i] for v in stacked)) for i in range(len(stacked[0]))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


@transform
def eager_and_disable_jit(f: Function) -> None:
    x, w = f.operands()
    wanted = jax.jit(f.gradients)(x, w)
    same_bytes(f.gradients(x, w), wanted)
    with jax.disable_jit():  # gradients of dot: test_transforms.py
        same_bytes(f.call(x, w), jax.jit(f.call)(x, w))


@transform
def vmap_along_any_axis(f: Function) -> None:
    xs, ws = f.operands(2)
    wanted = loop(jax.jit(f.call), xs, ws)
    for axis in (0, 1, -1):
        moved = [jnp.moveaxis(v, 0, axis) for v in (xs, ws)]
        same_bytes(jax.jit(jax.vmap(f.call, axis))(*moved), wanted)
    shared = jax.jit(jax.vmap(f.call, (0, None)))(xs, ws[0])
    same_bytes(shared, loop(jax.jit(lambda x: f.call(x, ws[0])), xs))


@transform
def nested_vmap_with_spmd_axis_name(f: Function) -> None:
    xs, ws = f.operands(2)
    wanted = loop(jax.jit(f.call), xs, ws)
    with jax.set_mesh(jax.make_mesh((1,), ("stage",), axis_types=(AxisType.Auto,))):
        inner = jax.vmap(f.call)
        got = jax.jit(jax.vmap(inner, spmd_axis_name="stage"))(xs[None], ws[None])
    same_bytes(jax.tree.map(lambda v: v[0], got), wanted)


@transform
def grad_and_vmap_of_grad(f: Function) -> None:
    xs, ws = f.operands(2)
    if not f.differentiable:
        with pytest.raises(TypeError, match="cannot be differentiated"):
            jax.grad(lambda x: jax.tree.leaves(f.call(x, ws[0]))[0].sum())(xs[0])
        return
    wanted = loop(jax.jit(f.gradients), xs, ws)
    same_bytes(jax.jit(jax.vmap(f.gradients))(xs, ws), wanted)


@transform
def scan_map_while_and_cond(f: Function) -> None:
    xs, ws = f.operands(2)
    wanted = loop(jax.jit(f.gradients), xs, ws)
    same_bytes(jax.lax.scan(lambda c, v: (c, f.gradients(*v)), 0, (xs, ws))[1], wanted)
    first = jax.tree.map(lambda v: v[0], wanted)

    @jax.jit
    def others(p: Any) -> Any:
        branch = jax.lax.cond(p, f.gradients, lambda x, w: f.gradients(-x, w), xs[0], ws[0])
        start = (0, jax.tree.map(jnp.zeros_like, first))
        last = jax.lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, f.gradients(xs[0], ws[0])), start
        )
        return branch, last[1]

    for got in others(True):
        same_bytes(got, first)


@transform
def remat_with_and_without_the_named_policy(f: Function) -> None:
    x, w = f.operands()
    wanted = jax.jit(f.gradients)(x, w)
    for policy in (None, POLICY):
        inner = dataclasses.replace(f, call=jax.checkpoint(f.call, policy=policy))
        same_bytes(jax.jit(inner.gradients)(x, w), wanted)


def meshes(*kinds: AxisType) -> list[Any]:
    return [jax.make_mesh((jax.device_count(),), ("d",), axis_types=(kind,)) for kind in kinds]


@transform
def shard_map_over_examples(f: Function) -> None:
    count = jax.device_count()
    xs, ws = f.operands(count)
    wanted = loop(jax.jit(f.gradients), xs, ws)

    def one(x: Any, w: Any) -> Any:
        return jax.tree.map(lambda v: v[None], f.gradients(x[0], w[0]))

    for mesh, check_vma in itertools.product(
        meshes(AxisType.Auto, AxisType.Explicit), (True, False)
    ):
        mapped = jax.shard_map(
            one, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma
        )
        with jax.set_mesh(mesh):
            placed = [jax.device_put(v, NamedSharding(mesh, P("d"))) for v in (xs, ws)]
            same_bytes(jax.device_get(jax.jit(mapped)(*placed)), jax.device_get(wanted))


@transform
def sharded_operands_on_automatic_and_explicit_meshes(f: Function) -> None:
    x, w = f.operands()
    wanted = jax.device_get(jax.jit(f.gradients)(x, w))
    for mesh in meshes(AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh):
            placed = (
                jax.device_put(x, NamedSharding(mesh, P("d"))),
                jax.device_put(w, NamedSharding(mesh, P())),
            )
            got = jax.jit(f.gradients)(*placed)
            same_bytes(jax.device_get(got), wanted)
            if mesh.axis_types == (AxisType.Explicit,) and f.differentiable:
                assert jax.typeof(got[1]).sharding.spec == jax.typeof(placed[0]).sharding.spec


@transform
def export_round_trip_also_for_cuda(f: Function) -> None:
    x, w = f.operands()
    function = jax.jit(f.gradients)
    exported = jax.export.export(function, platforms=("cpu", "cuda"), disabled_checks=CHECKS)(x, w)
    restored = jax.export.deserialize(exported.serialize())
    same_bytes(restored.call(x, w), function(x, w))
    only_cuda = jax.export.export(function, platforms=("cuda",), disabled_checks=CHECKS)(x, w)
    for name in ("amax", "quantize"):
        assert f"@jax_fp4_{name}" in only_cuda.mlir_module()


@transform
def donated_operands(f: Function) -> None:
    x, w = f.operands()
    wanted = jax.jit(f.gradients)(x, w)
    donated = jax.jit(f.gradients, donate_argnums=1)(x, jnp.array(w))
    same_bytes(donated, wanted)


# Without jit, ragged_dot is a hundred small programs.
SLOW = {("eager_and_disable_jit", "ragged_dot")}
CELLS = [
    pytest.param(*cell, marks=[pytest.mark.slow] if cell in SLOW else [])
    for cell in itertools.product(TRANSFORMS, FUNCTIONS)
]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("row", "name"), CELLS)
def test_cell(row: str, name: str) -> None:
    """One cell of the table."""
    TRANSFORMS[row](FUNCTIONS[name])


def test_products_have_no_effects() -> None:
    """So that XLA may merge equal calls and drop unused ones, and remat may move them."""
    for f in FUNCTIONS.values():
        assert not jax.make_jaxpr(f.gradients)(*f.operands()).effects


@pytest.mark.slow
def test_the_sharded_cells_on_four_devices() -> None:
    """The cells about meshes again, on four fake devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k",
         "test_cell and shard"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{2 * len(FUNCTIONS)} passed" in done.stdout
