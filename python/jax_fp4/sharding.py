"""How our primitives run on several devices: local calls, and the collectives around them.

A primitive's rule names the factors of its dimensions (as Shardy's rules do): dimensions of the
same factor are cut alike. `place` says which mesh axes cut which factor. From there both kinds of
mesh go the same way: operands are resharded to what was chosen, which gathers codes and scales
where they have to be whole, and each device runs the rule's local function.

On axes of type Explicit the types say how operands are sharded: `bind` makes a `shard_map`. On
automatic meshes XLA decides that after tracing: see automatic.py.
Inside of a user's `shard_map` an operand is what the device has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _compat

Local = Callable[[Callable[..., Any], Sequence[jax.Array], "Placement"], Sequence[jax.Array]]
Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
"""The mesh axes that cut each dimension of an array."""

Dims = tuple[tuple[str, int] | None, ...]
"""For each dimension its factor and how many elements a step of the factor has; None: never cut."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the operands and results of one call may be sharded.

    Attributes:
        sizes: steps of each factor. A cut lies between two steps, so that it cuts no block.
        operands: their dimensions.
        results: their dimensions.
        leading: the operands whose sharding counts; the others follow.
        order: where one mesh axis cuts two factors, the first of these keeps it.
        scattered: factors whose sums may be scattered over a dimension of the first result.
        local: ``(call, shards, placement) -> results``, what each device runs; ``call`` runs the
            primitive on shards, with the parameters that it is given as keywords changed. None for
            an operation of jax's.
    """

    sizes: Mapping[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    leading: tuple[int, ...]
    order: str
    local: (
        Callable[[Callable[..., Any], Sequence[jax.Array], Placement], Sequence[jax.Array]] | None
    )
    scattered: str = ""


def steps(size: int, step: int) -> int:
    """How many steps a dimension has; 1 where they do not divide it, so that it stays whole."""
    return size // step if size and size % step == 0 else 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh axes cut what.

    Attributes:
        cuts: (factor, axes).
        counts: (factor, devices along these axes).
        scatter: (dimension of the first result, axes that its sum is scattered over).
    """

    cuts: tuple[tuple[str, Axes], ...]
    counts: tuple[tuple[str, int], ...]
    scatter: tuple[tuple[int, Axes], ...] = ()

    def axes(self, factors: str) -> Axes:
        """The axes that cut any of these factors."""
        return tuple(axis for factor, axes in self.cuts if factor in factors for axis in axes)

    def count(self, factor: str) -> int:
        """Into how many parts a factor is cut."""
        return dict(self.counts).get(factor, 1)

    def index(self, factor: str) -> Any:
        """Which part this device has."""
        axes = self.axes(factor)
        return jax.lax.axis_index(axes) if axes else 0

    def spec(self, dims: Dims, first_result: bool = False) -> jax.P:
        """How an array with these dimensions is sharded."""
        scatter = dict(self.scatter) if first_result else {}
        parts = [
            (self.axes(entry[0]) if entry else ()) + scatter.get(i, ())
            for i, entry in enumerate(dims)
        ]
        return jax.P(*(part or None for part in parts))


def place(rule: Rule, specs: Sequence[Any], wish: Any, devices: Mapping[str, int]) -> Placement:
    """Chooses what each mesh axis cuts.

    Args:
        rule: of the call.
        specs: PartitionSpecs of the operands, as they come.
        wish: that of the first result, or None.
        devices: along each mesh axis.
    """
    specs = [_normal(spec, len(dims)) for spec, dims in zip(specs, rule.operands, strict=True)]
    wish = _normal(wish or (), len(rule.results[0]))
    roles: dict[str, list[str]] = {}
    for i in rule.leading:
        for entry, axes in zip(rule.operands[i], specs[i], strict=True):
            if entry is not None:
                for axis in axes:
                    roles.setdefault(axis, []).append(entry[0])
    wished = {
        axis: entry[0]
        for entry, axes in zip(rule.results[0], wish, strict=True)
        if entry
        for axis in axes
    }
    cuts: dict[str, list[str]] = {}
    for axis, factors in roles.items():
        own = wished.get(axis)
        factor = own if own in factors else min(factors, key=rule.order.index)
        count = math.prod(devices[a] for a in cuts.get(factor, ())) * devices[axis]
        if rule.sizes[factor] % count == 0:
            cuts.setdefault(factor, []).append(axis)
    chosen = tuple((factor, tuple(axes)) for factor, axes in cuts.items())
    counts = tuple((f, math.prod(devices[axis] for axis in axes)) for f, axes in chosen)
    placement = Placement(chosen, counts)
    sums = set(placement.axes(rule.scattered))
    scatter = []
    for i, (entry, axes) in enumerate(zip(rule.results[0], wish, strict=True)):
        own = placement.axes(entry[0]) if entry else ()
        rest = axes[len(own) :]
        count = math.prod(devices[axis] for axis in axes)
        if entry and rest and axes[: len(own)] == own and sums.issuperset(rest):
            if rule.sizes[entry[0]] * entry[1] % count == 0:  # a sum may be cut inside of a step
                scatter.append((i, rest))
    return dataclasses.replace(placement, scatter=tuple(scatter))


_RULES: dict[Any, Callable[..., Rule]] = {}


def register(primitive: Any, rule: Callable[..., Rule]) -> None:
    """``rule(shapes of the operands, **parameters)`` says how a primitive is sharded."""
    _RULES[primitive] = rule


def rule_of(primitive: Any, shapes: Sequence[Sequence[int]], params: Mapping[str, Any]) -> Rule:
    """The rule of a call."""
    return _RULES[primitive](*shapes, **params)


def local_function(
    primitive: Any, rule: Rule, placement: Placement, params: Mapping[str, Any]
) -> Any:
    """What each device runs: a function of its shards of the operands."""
    local = rule.local
    assert local is not None

    def call(*shards: Any, **changed: Any) -> Any:
        return primitive.bind(*shards, **{**params, **changed})

    return lambda *shards: tuple(local(call, shards, placement))


# ---- Explicit meshes -----------------------------------------------------------------------------


def spec_of(x: jax.Array) -> Spec:
    """The explicit mesh axes that cut each dimension of ``x``, as its type says."""
    return _normal(jax.typeof(x).sharding.spec, x.ndim)


def _normal(spec: Any, rank: int) -> Spec:
    parts = [
        () if part is None or part is jax.P.UNCONSTRAINED else (part,) if isinstance(part, str)
        else tuple(part)
        for part in spec
    ]  # fmt: skip
    return tuple(parts + [()] * (rank - len(parts)))


def _explicit_mesh(arrays: Sequence[jax.Array]) -> Any:
    """The mesh of arrays, if it has axes of type Explicit.

    Under a vmap over a sharded dimension the mesh in force is without the axes of that dimension,
    while types still name them.
    """
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    current = jax.sharding.get_abstract_mesh()
    if mesh is None or current.empty:
        return mesh
    return current if current.explicit_axes else None


def _reshard(x: jax.Array, mesh: Any, spec: jax.P) -> jax.Array:
    if spec_of(x) == _normal(spec, x.ndim):
        return x
    return jax.sharding.reshard(x, jax.NamedSharding(mesh, spec))


def bind(
    primitive: Any, *operands: jax.Array, wish: jax.NamedSharding | None = None, **params: Any
) -> Any:
    """``primitive.bind`` on operands that may be sharded.

    Args:
        primitive: one of ours.
        *operands: its operands.
        wish: how the first result is wanted; it may come otherwise.
        **params: its parameters.
    """
    mesh = _explicit_mesh(operands)
    if mesh is None:
        return primitive.bind(*operands, **params)
    rule = rule_of(primitive, [x.shape for x in operands], params)
    wanted = None if wish is None else wish.spec
    placement = place(rule, [spec_of(x) for x in operands], wanted, dict(mesh.shape))
    specs = [placement.spec(dims) for dims in rule.operands]
    placed = [_reshard(x, mesh, spec) for x, spec in zip(operands, specs, strict=True)]
    shapes = tuple(x.shape for x in operands)
    if not placement.cuts:
        return primitive.bind(*placed, **params)
    run = _on_shards(primitive, mesh, placement, shapes, tuple(params.items()))
    return _compat.varying_like(run(*placed), operands)


@functools.lru_cache(maxsize=1024)
def _on_shards(
    primitive: Any, mesh: Any, placement: Placement, shapes: Any, params: tuple[Any, ...]
) -> Any:
    """A compiled shard_map; kept, so that an eager call is compiled once."""
    rule = rule_of(primitive, shapes, dict(params))
    # Not all explicit axes: a vmap over a sharded dimension has taken some, and does not say which.
    names = {axis for _, axes in placement.cuts for axis in axes}
    return jax.jit(
        jax.shard_map(
            local_function(primitive, rule, placement, dict(params)),
            mesh=mesh,
            in_specs=tuple(placement.spec(dims) for dims in rule.operands),
            out_specs=tuple(
                placement.spec(dims, first_result=i == 0) for i, dims in enumerate(rule.results)
            ),
            axis_names=names,
            check_vma=False,
        )
    )


def sharding_of(x: jax.Array) -> jax.NamedSharding | None:
    """The sharding that the type of ``x`` names; None where there are no explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def like(x: jax.Array, sharding: jax.NamedSharding | None) -> jax.Array:
    """``x`` sharded as `sharding_of` said."""
    return x if sharding is None else _reshard(x, sharding.mesh, sharding.spec)


def parts_align(x: jax.Array, row_step: int, col_step: int) -> bool:
    """Whether every shard of x [..., R, C] that there may be is a whole number of steps.

    How automatic axes cut x is not known while it is traced: they may all cut the same dimension.
    """
    mesh = jax.typeof(x).sharding.mesh
    automatic = math.prod(mesh.shape[axis] for axis in mesh.auto_axes)
    for size, axes, step in zip(x.shape[-2:], spec_of(x)[-2:], (row_step, col_step), strict=True):
        count = automatic * math.prod(mesh.shape[axis] for axis in axes)
        if count != 1 and size % (count * step):
            return False
    return True


def _matrix_rule(shapes: Sequence[Sequence[int]], axes: Sequence[str]) -> Rule:
    """That of a product of matrices that are not quantized; see `multiply_plain`."""
    sizes: dict[str, int] = {}
    operands: list[Dims] = []
    for shape, axis, free in zip(shapes, axes, "mn", strict=True):
        names = ["b", free, "k"] if axis == "cols" else ["b", "k", free]
        sizes |= dict(zip(names, shape, strict=True))
        operands.append(tuple((name, 1) for name in names))
    result = (("b", 1), ("m", 1), ("n", 1))
    return Rule(sizes, tuple(operands), (result,), (0, 1), "bmnk", None, "k")


def of_product(a: jax.Array, b: jax.Array, axes: tuple[str, str]) -> jax.NamedSharding | None:
    """How the product of two matrices is sharded; None without explicit axes.

    Args:
        a: as in `multiply_plain`.
        b: as in `multiply_plain`.
        axes: as in `multiply_plain`.
    """
    mesh = _explicit_mesh((a, b))
    if mesh is None:
        return None
    rule = _matrix_rule((a.shape, b.shape), axes)
    placement = place(rule, [spec_of(a), spec_of(b)], None, dict(mesh.shape))
    return jax.NamedSharding(mesh, placement.spec(rule.results[0]))


def multiply_plain(
    a: jax.Array, b: jax.Array, axes: tuple[str, str], wish: jax.NamedSharding | None
) -> jax.Array:
    """A product that jax computes, sharded as ours are.

    Args:
        a: bfloat16 [B, M, K], or [B, K, M] where its axis is "rows".
        b: bfloat16 [B, N, K], or [B, K, N] where its axis is "rows".
        axes: which axis of a and of b is contracted.
        wish: see `bind`.

    Returns:
        float32 [B, M, N].
    """
    along_a, along_b = (2 if axis == "cols" else 1 for axis in axes)
    multiply = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((along_a,), (along_b,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    mesh = _explicit_mesh((a, b))
    if mesh is None:
        return multiply(a, b)
    rule = _matrix_rule((a.shape, b.shape), axes)
    wanted = None if wish is None else wish.spec
    placement = place(rule, [spec_of(a), spec_of(b)], wanted, dict(mesh.shape))
    a, b = (
        _reshard(x, mesh, placement.spec(dims))
        for x, dims in zip((a, b), rule.operands, strict=True)
    )
    out = placement.spec(rule.results[0], first_result=True)
    return multiply(a, b, out_sharding=jax.NamedSharding(mesh, out))


def reshape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """``jnp.reshape`` of an array that may be sharded explicitly.

    Shards stay where they are while they hold neighbours in the flat order, as those of the first
    of several merged dimensions do; the others are gathered first.
    """
    shape = tuple(shape)
    spec = spec_of(x)
    if not any(spec):
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh
    kept: list[Axes] = [()] * x.ndim
    target: list[Axes] = [()] * len(shape)
    for ins, outs in _groups(x.shape, shape):
        axes: list[str] = []
        for i in ins:
            kept[i] = spec[i]
            axes += spec[i]
            if math.prod(mesh.shape[axis] for axis in spec[i]) != x.shape[i]:
                break
        taken = 0
        for o in outs:
            count = 1
            while taken < len(axes) and shape[o] % (count * mesh.shape[axes[taken]]) == 0:
                count *= mesh.shape[axes[taken]]
                target[o] += (axes[taken],)
                taken += 1
            if count != shape[o]:
                break
        for i in ins:  # what found no place in the result
            kept[i] = tuple(axis for axis in kept[i] if axis in axes[:taken])
    x = _reshard(x, mesh, jax.P(*(part or None for part in kept)))
    sharding = jax.NamedSharding(mesh, jax.P(*(part or None for part in target)))
    return jax.lax.reshape(x, shape, out_sharding=sharding)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions that a reshape turns into one another, the smallest there are."""
    groups, i, o = [], 0, 0
    if 0 in before:
        return []
    while i < len(before) or o < len(after):
        ins, outs, left, right = [], [], 1, 1
        while not (ins or outs) or left != right:
            if (left <= right and i < len(before)) or o == len(after):
                left *= before[i]
                ins.append(i)
                i += 1
            else:
                right *= after[o]
                outs.append(o)
                o += 1
        groups.append((ins, outs))
    return groups
