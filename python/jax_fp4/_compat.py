"""What differs between the JAX versions we support. No other module may test versions."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import mlir


def result_aval(shape: Sequence[int], dtype: Any, operands: Sequence[Any]) -> Any:
    """The abstract value of a result.

    It varies over every manual mesh axis that an operand varies over; without that, custom_vjp
    inside ``shard_map(check_vma=True)`` fails. On a mesh with explicit axes it is of that mesh, not
    sharded: jax refuses operations on arrays of different meshes.
    """
    varying = frozenset().union(*(_varying_axes(x) for x in operands))
    like = next((x for x in operands if not x.sharding.mesh.empty), None)
    if like is None:
        return jax.core.ShapedArray(tuple(shape), np.dtype(dtype))
    manual = {"manual_axis_type": like.manual_axis_type.update(varying=varying)} if varying else {}
    return jax.core.ShapedArray(
        tuple(shape),
        np.dtype(dtype),
        sharding=jax.NamedSharding(like.sharding.mesh, jax.P(*[None] * len(shape))),
        **manual,
    )


def _varying_axes(aval: Any) -> frozenset[str]:
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """``arrays``, each made to vary over the manual mesh axes that any of them varies over.

    Inside ``shard_map(check_vma=True)`` a replicated operand beside a sharded one has to be marked,
    so that its gradient is summed over the devices.
    """
    own = [_varying_axes(jax.typeof(x)) for x in arrays]
    every = frozenset().union(*own)
    return [
        jax.lax.pcast(x, tuple(sorted(every - mine)), to="varying") if every - mine else x
        for x, mine in zip(arrays, own, strict=True)
    ]


def varying_like(results: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """``results``, each varying over every manual mesh axis that an operand varies over.

    A shard_map inside of another one, without check_vma, forgets the axes of the outer one.
    """
    every = frozenset().union(*(_varying_axes(jax.typeof(x)) for x in operands))
    missing = [tuple(sorted(every - _varying_axes(jax.typeof(x)))) for x in results]
    return [
        jax.lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(results, missing, strict=True)
    ]


def gathered(x: jax.Array) -> jax.Array:
    """``x`` with every explicitly sharded axis gathered; its gradient is sharded like ``x`` again.

    A custom call computes on whole operands. On automatic meshes XLA gathers by itself; on explicit
    ones the type says how ``x`` is sharded, and the results of a custom_vjp must have such types.
    """
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, jax.P(*[None] * x.ndim)))


def sum_scattered(x: jax.Array, axes: tuple[str, ...], dimension: int) -> jax.Array:
    """``x`` summed over manual mesh axes; each device keeps its part along ``dimension``.

    jax 0.12 cannot lower psum_scatter while an axis of the mesh is still Explicit (it gives the
    reduction's scalars the sharding of ``x``). There the parts are exchanged, which moves as many
    bytes, and summed afterwards.
    """
    if not jax.typeof(x).sharding.mesh.explicit_axes:
        return jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    count = jax.lax.axis_size(axes)
    shape = (*x.shape[:dimension], count, x.shape[dimension] // count, *x.shape[dimension + 1 :])
    parts = jax.lax.all_to_all(x.reshape(shape), axes, dimension, dimension)
    return parts.sum(dimension)


def automatic_mesh(ctx: Any) -> Any:
    """The mesh that XLA partitions what is lowered for; None for one device or inside shard_map.

    None also where types say how operands are sharded: what is lowered there needs no partitioning.
    """
    context = ctx.module_context.axis_context
    mesh = getattr(context, "abstract_mesh", None)
    if getattr(context, "num_devices", 1) == 1 or mesh is None or mesh.empty:
        return None
    return mesh if mesh.auto_axes == mesh.axis_names else None


def requires_devices(primitive: Any) -> None:
    """Tells jax that lowering a primitive needs to know the devices, as custom_partitioning does.

    Without that jax lowers once for all devices, and says nothing of the mesh.
    """
    from jax._src.dispatch import prim_requires_devices_during_lowering

    prim_requires_devices_during_lowering.add(primitive)


def _whole_axes(decode: Any, mesh: Any) -> Any:
    """Reads XLA's shardings; one by a part of a mesh axis, which has no name, is read as none.

    Shardy makes such ones for a dimension of 2 blocks on an axis of 4 devices.
    """

    def read(sharding: Any, rank: int) -> Any:
        try:
            return decode(sharding, rank)
        except ValueError:
            return jax.NamedSharding(mesh, jax.P(*[None] * rank))

    return read


_partitionings: dict[bytes, Any] = {}


def stable_partitioning_key(results: Sequence[Any], key: str) -> None:
    """Names the callbacks of a lowered custom_partitioning by what they do, not by their address.

    The name is part of the program, so with an address in it the persistent compile cache would
    never hit. What is kept under the name is a copy without the module, which would stay alive.
    """
    from jax._src.custom_partitioning import _sharding_callbacks

    owner = results[0].owner
    attribute = "backend_config"
    if attribute not in owner.attributes:
        return
    info = _sharding_callbacks.get(owner.attributes[attribute].value.encode())
    if info is None:
        return
    context = info.module_context
    key += f" {context.platforms} {info.mesh.device_ids.tolist()}"
    if key.encode() not in _partitionings:
        kept = copy.copy(info)
        kept.module_context = types.SimpleNamespace(
            platforms=context.platforms, backend=context.backend
        )
        kept.to_mesh_pspec_sharding = _whole_axes(info.to_mesh_pspec_sharding, info.mesh)
        _partitionings[key.encode()] = kept
    _sharding_callbacks[key.encode()] = _partitionings[key.encode()]
    owner.attributes[attribute] = mlir.ir.StringAttr.get(key, owner.context)


def weakly_typed(x: jax.Array) -> jax.Array:
    """``x`` with a weak type, as the result of an operation on Python scalars has."""
    return jax.lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def without_mesh() -> Any:
    """A context in which abstract evaluation sees no mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def runtime_ffi_api_version() -> tuple[int, int] | None:
    """The XLA FFI version of the running jaxlib, from the headers it ships; None if unknown."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        return None
    return int(found[0][1]), int(found[1][1])
