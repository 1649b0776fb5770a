"""ragged_dot: each group of rows times its own matrix (mixture of experts), with gradients.

Groups lie in tiles of 128 rows, so that no tile, no block and no Hadamard group holds rows of two
of them. How many tiles there can be follows from static shapes; which tile belongs to which group
is computed on the device from the group sizes. A group has one amax, as if it were a dot of its
own. Each of the three products is one call (grouped.py), g being the group of tile t:

    fprop: y[t] = x[t] . w[g]    dgrad: dx[t] = dy[t] . w[g]^T
    wgrad: dw[g] = x^T . dy over the tiles of g, the columns of all tiles side by side
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp4 import _check, _compat, sharding
from jax_fp4.block_array import BlockScaledArray
from jax_fp4.contraction import (
    as_float,
    finish,
    operand,
    options,
    reason_to_stay,
    reference,
    scope,
)
from jax_fp4.grouped import UNIT, multiply_groups
from jax_fp4.product import Product, matrices, save, sides
from jax_fp4.recipe import Operand, Recipe

_WHERE = "ragged_dot"


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    out_sharding: Any = None,
    *,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with quantized operands and quantized gradients.

    ``result[i] = lhs[i] @ rhs[g]`` with g the group of row i: the first ``group_sizes[0]`` rows are
    group 0, and so on. Rows behind the last group are zero. Group sizes stay on the device; any
    size is allowed, also 0. A negative one counts as 0, and groups end with the last row, so that
    nothing outside the operands is read or written whatever the sizes are.

    Args:
        lhs: float32, bfloat16 or float16 [M, K], the rows of all groups one after the other.
        rhs: float32, bfloat16 or float16 [G, K, N], one matrix a group.
        group_sizes: integers [G].
        precision: see `dot_general`.
        preferred_element_type: dtype of the result; by default the promoted dtype.
        group_offset: not supported.
        out_sharding: see `dot_general`.
        recipe: see `dot_general`; rhs is the weight.
        key: see `dot_general`.

    Returns:
        [M, N]. A group's rows, and the gradient of its matrix, are those of a `dot` of that group
        alone where the recipe rounds to nearest; the order of f32 sums may differ.

    Raises:
        Exception: what lax.ragged_dot raises for these arguments, of the same type.
    """
    how = options(_WHERE, recipe, key, precision)
    if group_offset is not None:
        _check.fail(
            _WHERE,
            "group_offset",
            "None",
            repr(group_offset),
            "cut rhs and group_sizes, and pass rows that begin with the first group",
            TypeError,
        )
    arrays = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes}
    given: list[jax.Array] = []
    for name, value in arrays.items():
        x = operand(_WHERE, name, value)
        if isinstance(x, BlockScaledArray):
            _check.fail(_WHERE, name, "an array", type(x).__name__, "pass the array", TypeError)
        given.append(x)
    lhs, rhs, sizes = given

    def call(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return jax.lax.ragged_dot(
            lhs,
            rhs,
            sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    like = reference(_WHERE, call, dict(zip(arrays, given, strict=True)), out_sharding)
    reason = reason_to_stay(how.recipe, (lhs, rhs), like.dtype, lhs.shape[1])
    if reason is not None:
        with scope(_WHERE, "as_it_is", reason):
            return call(lhs, rhs, sizes)
    lhs, rhs, sizes = (_compat.gathered(x) for x in (as_float(lhs), as_float(rhs), sizes))
    if how.recipe.weight == "lhs":
        _check.fail(
            _WHERE,
            "recipe",
            "one whose weight is the right operand",
            f"{how.recipe.name!r} with weight='lhs'",
            "the matrices of the groups are the weights",
        )
    spec = Product(*sides(how.recipe, False, "cols", "rows"), out_dtype=like.dtype.name)
    words = [] if how.words is None else [how.words]
    lhs, rhs, sizes, *words = _compat.vary_alike(lhs, rhs, sizes, *words)
    with scope(_WHERE, how.recipe.name):
        y = _compiled(lhs, rhs, _inside(sizes, lhs.shape[0]), words[0] if words else None, spec)
    return finish(y, like, out_sharding)


# ---- Tiles ---------------------------------------------------------------------------------------


def _inside(sizes: jax.Array, rows: int) -> jax.Array:
    """int32 [G]: ``sizes`` with 0 for negative ones, cut where there are no more rows."""
    if sizes.shape[0] == 0:
        return sizes.astype(jnp.int32)
    if sizes.dtype.itemsize < 4:  # may not hold the number of rows
        sizes = sizes.astype(jnp.int32)
    sizes = jnp.clip(sizes, 0, rows).astype(jnp.int32)
    # A sum that stops at `rows` cannot overflow.
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes)
    return jnp.diff(ends, prepend=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Where the rows of M lie in T tiles."""

    group: jax.Array  # int32 [T], of each tile; G for tiles that nothing is in
    starts: jax.Array  # int32 [G + 1], in T * 128: where groups start, and the last one's tiles end
    row: jax.Array  # int32 [T, 128], which row of M is there; M for none
    place: jax.Array  # int32 [M], where in T * 128 a row lies; T * 128 for rows behind all groups

    def spread(self, x: jax.Array) -> jax.Array:
        """[M, C] as [T, 128, C], zero where no row is."""
        return x.at[self.row].get(mode="fill", fill_value=0)

    def collect(self, tiles: jax.Array) -> jax.Array:
        """[T * 128, C] as [M, C], zero for rows behind all groups."""
        return tiles.at[self.place].get(mode="fill", fill_value=0)

    def share(self, groups: int) -> Callable[[jax.Array], jax.Array]:
        """From an amax for each tile, as bits uint32 [1, T], to that of the tile's group."""

        def shared(bits: jax.Array) -> jax.Array:
            largest = jnp.zeros_like(bits, shape=(groups,)).at[self.group].max(bits[0], mode="drop")
            return largest.at[self.group].get(mode="fill", fill_value=0)[None]

        return shared

    def by_group(self, scale: jax.Array, groups: int) -> jax.Array:
        """float32 [G] of what all tiles of a group have in common, [T]; 0 for empty groups."""
        return jnp.zeros_like(scale, shape=(groups,)).at[self.group].set(scale, mode="drop")


def _tiles(rows: int, sizes: jax.Array) -> _Tiles:
    """The tiles of ``rows`` rows in groups of ``sizes``, which is on the device.

    At most min(G, M) groups are not empty, and each of them fills all its tiles but one: there are
    never more than floor((M + 127 * min(G, M)) / 128) tiles.
    """
    groups = sizes.shape[0]
    count = (rows + (UNIT - 1) * min(groups, rows)) // UNIT
    ends = jnp.cumsum(sizes)
    tile_counts = (sizes + UNIT - 1) // UNIT
    tile_ends = jnp.cumsum(tile_counts)
    tile = jnp.arange(count, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, tile, side="right", method="scan_unrolled")
    of = functools.partial(jnp.take, indices=group, mode="clip")
    first = (tile - of(tile_ends - tile_counts)) * UNIT  # in its group
    inside = first[:, None] + jnp.arange(UNIT, dtype=jnp.int32)
    exists = (inside < of(sizes)[:, None]) & (group < groups)[:, None]
    row = jnp.where(exists, inside + of(ends - sizes)[:, None], rows)
    number = jnp.arange(rows, dtype=jnp.int32)
    own = jnp.searchsorted(ends, number, side="right", method="scan_unrolled")
    of = functools.partial(jnp.take, indices=own, mode="clip")
    place = number - of(ends - sizes) + of(tile_ends - tile_counts) * UNIT
    place = jnp.where(own < groups, place, count * UNIT)  # else behind all groups
    starts = jnp.concatenate([jnp.zeros_like(tile_ends, shape=(1,)), tile_ends]) * UNIT
    return _Tiles(*(x.astype(jnp.int32) for x in (group, starts, row, place)))


# ---- The three products --------------------------------------------------------------------------


def _rows_together(x: BlockScaledArray) -> BlockScaledArray:
    """Tiles [T, 128, K] as [1, T * 128, K]; tiles of scales hold 128 rows as well."""

    def together(part: jax.Array) -> jax.Array:
        count, rows, *rest = part.shape
        return sharding.reshape(part, (count * rows, *rest))[None]

    return dataclasses.replace(x, values=together(x.values), scales=together(x.scales))


def _columns_together(x: BlockScaledArray) -> BlockScaledArray:
    """Tiles [T, C, 128] as [1, C, T * 128]; packed rows and tiles of scales end at 128."""

    def together(part: jax.Array) -> jax.Array:
        count, rows, length, *rest = part.shape
        part = jnp.swapaxes(part, 0, 1)
        return sharding.reshape(part, (rows, count * length, *rest))[None]

    values, scales = together(x.values), together(x.scales)
    length = x.values.shape[0] * UNIT
    return dataclasses.replace(x, values=values, scales=scales, length=length)


def _by_tile(tiles: _Tiles, x: BlockScaledArray, w: BlockScaledArray, dtype: Any) -> jax.Array:
    """[T * 128, N]: each tile of x [T, 128, K] times the matrix of its group, w [G, N, K].

    What lies in tiles of no group is not defined.
    """
    groups = w.values.shape[0]
    scales = tiles.by_group(x.global_scale, groups), w.global_scale
    units = tiles.group.astype(jnp.uint32)
    return multiply_groups(_rows_together(x), w, scales, units, "rows", dtype)[0]


def _by_group(tiles: _Tiles, x: BlockScaledArray, dy: BlockScaledArray, like: Any) -> jax.Array:
    """[G, K, N]: the sum over a group's tiles of x [T, K, 128] times dy [T, N, 128]."""
    x_scale, dy_scale = (tiles.by_group(v.global_scale, like.shape[0]) for v in (x, dy))
    a, b = _columns_together(x), _columns_together(dy)
    starts = tiles.starts.astype(jnp.uint32)
    return multiply_groups(a, b, (x_scale, dy_scale), starts, "k", like.dtype)


_WGRAD = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(),
)


def _plain(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """A product that the recipe leaves unquantized: bfloat16 operands, float32 sums."""
    lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    if rhs.ndim == 3:
        y = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32)
    else:
        y = jax.lax.ragged_dot_general(lhs, rhs, sizes, _WGRAD, preferred_element_type=jnp.float32)
    return y.astype(dtype)


Wanted = tuple[Operand | None, str, int]


def _quantized(
    x: jax.Array, wanted: list[Wanted], key: jax.Array | None = None, **options: Any
) -> list[Any]:
    """`matrices` of what the recipe quantizes, None for what it does not."""
    made = iter(matrices(x, [one for one in wanted if one[0] is not None], key, **options))
    return [None if one[0] is None else next(made) for one in wanted]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ragged(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, key: jax.Array | None, spec: Product
) -> jax.Array:
    return _forward(lhs, rhs, sizes, spec, saved=False)[0]


def _forward(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, spec: Product, saved: bool
) -> tuple[jax.Array, Any, Any]:
    """The result, and what the backward pass needs of lhs and rhs."""
    if lhs.shape[0] == 0 or rhs.shape[0] == 0:
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), spec.out_dtype), None, None
    tiles = _tiles(lhs.shape[0], sizes)
    along, across = [(spec.lhs.forward, "cols", 0)], [(spec.rhs.forward, "rows", 0)]
    if saved:
        along.append((spec.lhs.backward, "rows", 0))
        across.append((spec.rhs.backward, "cols", 0))
    with jax.named_scope("fprop"):
        share = tiles.share(rhs.shape[0])
        x, *lhs_saved = _quantized(tiles.spread(lhs), along, share_amax=share)
        w, *rhs_saved = _quantized(rhs, across)
        if x is None:
            y = _plain(lhs, rhs, sizes, spec.out_dtype)
        else:
            y = tiles.collect(_by_tile(tiles, x, w, spec.out_dtype))
    if not saved:
        return y, None, None
    (kept,), (kept_w,) = lhs_saved, rhs_saved
    kept = lhs.astype(jnp.bfloat16) if kept is None else kept
    return y, kept, rhs.astype(jnp.bfloat16) if kept_w is None else kept_w


def _ragged_fwd(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, key: jax.Array | None, spec: Product
) -> tuple[jax.Array, Any]:
    y, lhs_saved, rhs_saved = _forward(lhs, rhs, sizes, spec, saved=True)
    like = (jnp.zeros((0, *lhs.shape), lhs.dtype), jnp.zeros((0, *rhs.shape), rhs.dtype))
    return y, (*save((lhs_saved, rhs_saved)), sizes, key, like)


def _ragged_bwd(spec: Product, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    lhs_saved, rhs_saved, sizes, key, like = residuals
    lhs_like, rhs_like = (jnp.zeros_like(v, shape=v.shape[1:]) for v in like)
    if lhs_saved is None:
        return lhs_like, rhs_like, None, None
    tiles = _tiles(dy.shape[0], sizes)
    wanted = [
        (spec.lhs.cotangent, "cols", spec.lhs.stream),
        (spec.rhs.cotangent, "rows", spec.rhs.stream),
    ]
    share = tiles.share(rhs_like.shape[0])
    for_lhs, for_rhs = _quantized(tiles.spread(dy), wanted, key, share_amax=share)
    with jax.named_scope("dgrad"):
        if for_lhs is None:
            dlhs = _plain(dy, rhs_saved.swapaxes(1, 2), sizes, lhs_like.dtype)
        else:
            dlhs = tiles.collect(_by_tile(tiles, for_lhs, rhs_saved, lhs_like.dtype))
    with jax.named_scope("wgrad"):
        if for_rhs is None:
            drhs = _plain(lhs_saved, dy, sizes, rhs_like.dtype)
        else:
            drhs = _by_group(tiles, lhs_saved, for_rhs, rhs_like)
    return dlhs, drhs, None, None


_ragged.defvjp(_ragged_fwd, _ragged_bwd)

# So that an eager call is one program, and not a hundred small ones.
_compiled = jax.jit(_ragged, static_argnums=4, inline=True)
