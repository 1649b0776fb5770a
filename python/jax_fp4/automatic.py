"""Our primitives on automatic meshes: `custom_partitioning`, made where a primitive is lowered.

XLA decides how operands are sharded after tracing: Shardy carries shardings through a call by the
rule that we give it, then XLA asks how the call is cut, and gets the local function of sharding.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir

from jax_fp4 import _compat
from jax_fp4.sharding import Dims, Rule, local_function, place, rule_of


def _shardy(rule: Rule) -> tuple[str, dict[str, Any]]:
    """The rule in Shardy's notation, with the sizes of factors that are only parts of dimensions.

    A dimension with steps of several elements is "(factor inside)"; one that is never cut has a
    name of its own.
    """
    own = 0
    parts: dict[str, int] = {}
    whole: set[str] = set()

    def named(dims: Dims) -> str:
        nonlocal own
        words = []
        for entry in dims:
            own += 1
            if entry is None or rule.sizes[entry[0]] <= 1:
                words.append(f"own{own}")
            elif entry[1] == 1:
                whole.add(entry[0])
                words.append(entry[0])
            else:
                parts[entry[0]], parts[f"own{own}"] = rule.sizes[entry[0]], entry[1]
                words.append(f"({entry[0]} own{own})")
        return " ".join(words)

    left, right = ([named(dims) for dims in group] for group in (rule.operands, rule.results))
    sizes = {name: size for name, size in parts.items() if name not in whole}
    # Without repetition, in the order in which they appear: Shardy wants them sorted.
    cut = dict.fromkeys(e[0] for d in rule.operands for e in d if e and rule.sizes[e[0]] > 1)
    kept = {e[0] for d in rule.results for e in d if e}
    return (
        f"{', '.join(left)} -> {', '.join(right)}",
        {"reduction_factors": tuple(f for f in cut if f not in kept), **sizes},
    )


def lower(ctx: Any, primitive: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Lowers a primitive for an automatic mesh; None where XLA has nothing to partition."""
    mesh = _compat.automatic_mesh(ctx)
    if mesh is None:
        return None
    if ctx.module_context.lowering_parameters.for_export:
        raise ValueError(
            f"jax_fp4: {primitive.name} cannot be exported for the {mesh.size} devices of an "
            "automatic mesh, since XLA asks Python how to partition it; use a mesh with axes of "
            "type Explicit, or jax.shard_map, or export for one device"
        )
    shapes = [aval.shape for aval in ctx.avals_in]
    rule = rule_of(primitive, shapes, params)

    def call(*arrays: Any) -> tuple[Any, ...]:
        return tuple(primitive.bind(*arrays, **params))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        specs = [x.sharding.spec for x in arguments]
        placement = place(rule, specs, results[0].sharding.spec, dict(mesh.shape))

        def put(spec: jax.P) -> jax.NamedSharding:
            return jax.NamedSharding(mesh, spec)

        return (
            mesh,
            local_function(primitive, rule, placement, params),
            tuple(put(placement.spec(dims, i == 0)) for i, dims in enumerate(rule.results)),
            tuple(put(placement.spec(dims)) for dims in rule.operands),
        )

    # A factor that an axis does not divide: Shardy would cut it by a part of the axis, which no
    # PartitionSpec can name.
    axes = math.lcm(*mesh.axis_sizes)
    sizes = {f: size if size % axes == 0 else 1 for f, size in rule.sizes.items()}
    rule = dataclasses.replace(rule, sizes=sizes)
    notation, options = _shardy(rule)
    partitioned = custom_partitioning(call)
    partitioned.def_partition(partition, sharding_rule=notation, **options)
    results = mlir.lower_fun(partitioned, multiple_results=True)(ctx, *operands)
    _compat.stable_partitioning_key(
        results, f"{primitive.name} {shapes} {sorted(params.items())} {mesh}"
    )
    return results
