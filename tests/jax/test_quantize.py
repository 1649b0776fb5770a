"""quantize, quantize_both and dequantize against the oracle, byte for byte.

Contract: the bytes are those of tests/oracles for every format, option, dtype and shape; leading
dimensions have an amax each and running block numbers; a quantized array is an ordinary pytree.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from oracles import pack, quantizer, tables
from support.jax_reference import (
    DTYPES,
    assert_bytes,
    bits,
    encode,
    expect_f32,
    gaussian,
    same_bytes,
    widen,
)

FORMATS = {format.name: format for format in fp4.FORMATS}
SEED = (0x89ABCDEF, 0x01234567)
RULES = ("rceil", "floor")


def random_matrix(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Values over many binades, with zeros of both signs, midpoints and subnormals among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))
    x = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0, 0.25, -5.0, 1e-6, 6e-8], shape), x)
    return encode(x.astype(np.float32), dtype)


def option_sets(format: fp4.Format) -> list[dict[str, Any]]:
    """Every option that goes with a format, alone and in the combinations that training uses."""
    sets: list[dict[str, Any]] = [
        {},
        {"rounding": "stochastic", "seed": SEED, "stream": 3},
        {"hadamard": True},
        {"hadamard": (1, -1) * 8, "rounding": "stochastic", "seed": SEED},
    ]
    if format.scale != "unit":
        sets += [{"scaling": "2d"}, {"scaling": "2d", "rounding": "stochastic", "seed": SEED}]
    if format.scale == "ue8m0":
        sets += [{"scale_rule": "floor"}, {"scale_rule": "floor", "scaling": "2d"}]
    if format.scale == "ue4m3":
        sets += [{"four_over_six": True}, {"four_over_six": True, "scaling": "2d"}]
        sets += [{"four_over_six": True, "hadamard": True}]
    return sets


def public(options: dict[str, Any]) -> dict[str, Any]:
    """The oracle's keywords as the public function takes them."""
    words = options.get("seed")
    return options if words is None else {**options, "seed": jnp.array(words, jnp.uint32)}


CASES = [
    pytest.param(format, options, id=f"{format}-{'-'.join(map(str, options.values())) or 'plain'}")
    for format in fp4.FORMATS
    for options in option_sets(format)
]


@pytest.mark.parametrize(("format", "options"), CASES)
def test_bytes_are_those_of_the_oracle(format: fp4.Format, options: dict[str, Any]) -> None:
    """Every format and option along both axes, in all dtypes, with leading dimensions."""
    for i, dtype in enumerate(DTYPES):
        x = random_matrix(i, (3, 37, 50), dtype)
        for axis in (-1, -2):
            q = fp4.quantize(x, format, axis=axis, **public(options))
            assert_bytes(q, x, axis, **options)


SHAPES = [
    (1, 1), (1, 16), (16, 1), (2, 15), (3, 17), (31, 33), (5, 64), (127, 7), (129, 129), (0, 64),
    (4, 0), (0, 0), (2, 3, 20), (2, 1, 3, 19), (0, 3, 16), (2, 0, 5), (1, 1, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", [fp4.NVFP4, fp4.MXFP6_E3M2, fp4.FP8_E4M3], ids=str)
def test_every_shape_and_axis(format: fp4.Format, shape: tuple[int, ...]) -> None:
    """Odd, prime, one and zero sizes, any rank, every axis: bytes, metadata, the way back."""
    x = gaussian(len(shape), shape)
    for axis in range(-len(shape), len(shape)):
        q = fp4.quantize(x, format, axis=axis)
        assert_bytes(q, x, axis)
        negative = axis - len(shape) if axis >= 0 else axis
        assert (q.shape, q.ndim, q.axis) == (shape, len(shape), negative)
        assert (q.length, q.dtype, q.layout) == (shape[axis], np.float32, "linear")
        back = fp4.dequantize(q)
        assert (back.shape, back.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_non_finite_inputs_spoil_their_block_only(format: fp4.Format, axis: int) -> None:
    """NaN, +Inf, -Inf: the NaN scale in their block (tile, if 2-D), amax over the finite values."""
    x = np.array(widen(gaussian(5, (2, 40, 70))))
    x[0, 3, 5], x[0, 3, 40], x[0, 20, 69], x[1, 39, 0] = np.nan, np.inf, -np.inf, np.nan
    nan_sign_payload = np.array([0xFF800001], np.uint32).view(np.float32)[0]
    x[1, 0, 33] = nan_sign_payload
    options = [{}, {"hadamard": True}, {"rounding": "stochastic", "seed": SEED}]
    options += [] if format.scale == "unit" else [{"scaling": "2d"}]
    for dtype in DTYPES:
        for option in options:
            value = encode(x, dtype)
            q = fp4.quantize(value, format, axis=axis, **public(option))
            assert_bytes(q, value, axis, **option)
            broken = np.isnan(widen(fp4.dequantize(q, jnp.float32)))
            assert 0 < broken.sum() < broken.size


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
def test_all_non_finite_and_all_zero_tensors(format: fp4.Format) -> None:
    """No finite value gives amax 0; zeros of both signs keep their sign and give no NaN."""
    for fill in (np.nan, np.inf, -np.inf, 0.0, -0.0):
        x = jnp.full((3, 40), fill, jnp.float32)
        q = fp4.quantize(x, format)
        assert_bytes(q, x)
        back = widen(fp4.dequantize(q))
        if fill == 0.0:
            assert (back == 0).all() and (np.signbit(back) == np.signbit(np.float32(fill))).all()
        else:
            assert np.isnan(back).all()


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
@pytest.mark.parametrize(
    "magnitude", [1e-45, 9.2e-41, 1e-40, 1e-38, 6e-38, 5e-35, 7e-36, 1e-36, 1e30, 3.4028235e38]
)
def test_extreme_magnitudes(format: fp4.Format, magnitude: float) -> None:
    """Subnormals are kept and nothing overflows, eagerly and under jit (XLA sets FTZ and DAZ)."""
    rng = np.random.default_rng(1)
    x = jnp.asarray((rng.uniform(-1, 1, (4, 64)) * magnitude).astype(np.float32).clip(-3.4e38))
    for q in (fp4.quantize(x, format), jax.jit(fp4.quantize, static_argnums=1)(x, format)):
        assert_bytes(q, x)
        back = widen(fp4.dequantize(q))
        # The code above the largest f32 stands for Inf when it is decoded.
        assert np.isfinite(back).all() or (magnitude > 3e38 and not np.isnan(back).any())
        assert (back != 0).any() or magnitude < 1e-37
    filled = jnp.full((1, 16), magnitude, jnp.float32)
    assert_bytes(jax.jit(fp4.quantize, static_argnums=1)(filled, format), filled)


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
def test_ties_and_block_scales_of_adversarial_values(format: fp4.Format) -> None:
    """Midpoints of codes, block maxima at midpoints of scales, saturation: +- one ulp each."""
    kind = format.element
    points = np.concatenate([tables.MIDPOINTS[kind], tables.MAGNITUDES[kind]])
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), [956, 957, 960, 464]]
    )
    rng = np.random.default_rng(2)
    x = rng.choice(points.astype(np.float32), (64, 128)) * rng.choice([-1, 1], (64, 128))
    x[:, ::32] = tables.MAX[kind]
    x = x.astype(np.float32)
    for rule in RULES if format.scale == "ue8m0" else RULES[:1]:
        assert_bytes(fp4.quantize(jnp.asarray(x), format, scale_rule=rule), x, scale_rule=rule)


def test_flush_edges_of_nvfp4() -> None:
    """A block survives while gamax/bamax < 458752 = 2688 / 6 * 2**10, and is zero from there on."""
    for ratio, survives in ((28672.0, True), (458751.0, True), (458752.0, False)):
        x = np.zeros((2, 16), np.float32)
        x[0, 0], x[1, 0] = ratio, 1.0
        q = fp4.quantize(jnp.asarray(x))
        assert_bytes(q, x)
        assert bool(widen(fp4.dequantize(q))[1, 0] != 0) is survives


@pytest.mark.parametrize("format", [fp4.NVFP4, fp4.FP8_E5M2], ids=str)
@pytest.mark.parametrize("amax", [7.5, 1e-40, 0.0, 3.4028235e38])
def test_a_given_amax_replaces_the_measured_one(format: fp4.Format, amax: float) -> None:
    """One amax for all leading indices, or one each; it is also what `q.amax` reports."""
    x = gaussian(7, (2, 5, 33))
    assert_bytes(fp4.quantize(x, format, amax=amax), x, amax=amax)
    each = np.array([amax, 4.0], np.float32)
    q = fp4.quantize(x, format, amax=jnp.asarray(each), axis=-2)
    assert_bytes(q, x, -2, amax=each)


BOTH = [
    ({}, {}),
    ({"scaling": "2d"}, {"scaling": "2d"}),
    ({"rounding": "stochastic"}, {"rounding": "stochastic", "stream": 1, "hadamard": True}),
    ({}, {"hadamard": True}),
    ({"hadamard": True}, {"hadamard": (-1,) * 16}),
    ({"rounding": "stochastic", "stream": 9}, {"amax": 3.5}),
]


@pytest.mark.parametrize(("row", "col"), BOTH, ids=range(len(BOTH)))
@pytest.mark.parametrize("format", [fp4.NVFP4, fp4.MXFP4, fp4.MXFP6_E2M3, fp4.FP8_E4M3], ids=str)
def test_quantize_both_equals_two_quantizes(
    format: fp4.Format, row: dict[str, Any], col: dict[str, Any]
) -> None:
    """One pass over x gives the bytes of two; options may differ per copy."""
    if format.scale == "unit" and "scaling" in row:
        row = col = {"rounding": "stochastic"}
    if not format.tensor_scaled:
        col = {name: value for name, value in col.items() if name != "amax"}
    words = {"seed": jnp.array(SEED, jnp.uint32)}
    seed = words if "stochastic" in (row.get("rounding"), col.get("rounding")) else {}
    for shape in ((45, 70), (2, 3, 16, 33)):
        x = random_matrix(3, shape, "bfloat16")
        first, second = fp4.quantize_both(x, format, row=row, col=col, **seed)
        for got, axis, options in ((first, -1, row), (second, -2, col)):
            own = seed if options.get("rounding") == "stochastic" else {}
            same_bytes(got, fp4.quantize(x, format, axis=axis, **options, **own))
            assert_bytes(got, x, axis, **options, **({"seed": SEED} if own else {}))


@pytest.mark.parametrize("format", [f for f in fp4.FORMATS if f.scale != "unit"], ids=str)
@pytest.mark.parametrize("shape", [(48, 80), (33, 65), (1, 100)], ids=str)
def test_two_dimensional_scales_make_the_copies_transposes(
    format: fp4.Format, shape: tuple[int, int]
) -> None:
    """quantize(W, 2d).T == quantize(W.T, 2d), ragged edge tiles included, from one pass or two."""
    w = gaussian(11, shape, "bfloat16")
    row, col = fp4.quantize_both(w, format, scaling="2d")
    transposed = fp4.quantize(w.T, format, scaling="2d")
    np.testing.assert_array_equal(np.asarray(col.values), np.asarray(transposed.values))
    np.testing.assert_array_equal(np.asarray(col.scales), np.asarray(transposed.scales))
    np.testing.assert_array_equal(np.asarray(row.codes()).T, np.asarray(col.codes()))
    np.testing.assert_array_equal(
        bits(fp4.dequantize(row)),
        bits(fp4.dequantize(fp4.quantize(w, format, scaling="2d", axis=0))),
    )


def test_row_and_column_quantization_agree_through_the_transpose() -> None:
    """Blocks along axis 0 of x are blocks along axis 1 of x.T, stored alike."""
    x = gaussian(12, (70, 45))
    for format in fp4.FORMATS:
        left, right = fp4.quantize(x, format, axis=0), fp4.quantize(x.T, format, axis=1)
        same_bytes(left.values, right.values)
        same_bytes(left.scales, right.scales)
        assert left.shape == right.shape[::-1]


# ---- Views, layouts and the pytree ---------------------------------------------------------------


def test_the_low_nibble_holds_the_even_element() -> None:
    """0.5, 1, 1.5, 2, ... with scale 1 is 0x21 0x43 0x65 0x77."""
    x = jnp.array([[0.5, 1, 1.5, 2, 3, 4, 6, 6, -0.0, -0.5, 0, 0, 0, 0, 0, 0]], jnp.float32)
    q = fp4.quantize(x, amax=2688.0)
    assert np.asarray(q.values)[0].tolist() == [0x21, 0x43, 0x65, 0x77, 0x98, 0, 0, 0] + [0] * 8
    assert np.asarray(q.scales).tolist() == [[0x38]] and float(q.global_scale) == 1.0


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 31, 128, 130])
def test_codes_and_float4_view_unpack_every_element(format: fp4.Format, k: int) -> None:
    """codes(): one a byte; as_float4(): the values of the E2M1 table; others refuse it."""
    x = gaussian(k, (2, 3, k))
    q = fp4.quantize(x, format)
    wanted = [quantizer.quantize(m, format.name, row_offset=3 * i) for i, m in enumerate(widen(x))]
    codes = np.stack([one.codes for one in wanted])
    np.testing.assert_array_equal(np.asarray(q.codes()), codes)
    if format.bits != 4:
        with pytest.raises(ValueError, match=r"format.*4-bit.*codes\(\)"):
            q.as_float4()
        return
    view = q.as_float4()
    assert (view.dtype, view.shape) == (jnp.float4_e2m1fn, x.shape)
    values = np.asarray(view.astype(jnp.float32))
    np.testing.assert_array_equal(values, tables.VALUES["e2m1"][codes].astype(np.float32))


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_rounds_the_oracles_values_once(format: fp4.Format, dtype: str) -> None:
    """fl(fl(code * scale) * global_scale) in f32, then one rounding to the asked dtype."""
    x = random_matrix(21, (2, 17, 45), "float32")
    for scale in (1.0, 1e-30, 1e25):
        scaled = jnp.asarray(widen(x) * np.float32(scale))
        q = fp4.quantize(scaled, format, axis=-2)
        got = fp4.dequantize(q, jnp.dtype(dtype))
        for i, matrix in enumerate(widen(scaled)):
            one = quantizer.quantize(matrix, format.name, axis=0, row_offset=45 * i)
            with np.errstate(over="ignore"):
                wanted = encode(one.dequantize().T, dtype)
            np.testing.assert_array_equal(bits(got[i]), bits(wanted))


def test_relative_error_is_that_of_the_format_at_any_scale() -> None:
    """dequantize(quantize(x)) is near x for x scaled by 1e-6, 1 and 1e6: no scale is inverted."""
    x = widen(gaussian(3, (64, 256)))
    for scale in (1e-6, 1.0, 1e6):
        for format in fp4.FORMATS:
            scaled = jnp.asarray(x * np.float32(scale))
            back = widen(fp4.dequantize(fp4.quantize(scaled, format)))
            error = np.linalg.norm(back - widen(scaled)) / np.linalg.norm(widen(scaled))
            assert 0.005 < error < 0.2


def test_inputs_that_are_views_are_read_by_value() -> None:
    """Sliced, strided, transposed and broadcast inputs equal a fresh copy, also under jit."""
    x = gaussian(31, (48, 96))
    views = {
        "columns": lambda v: v[:, 16:80],
        "strided": lambda v: v[::2],
        "reversed": lambda v: v[::-1, ::3],
        "transposed": lambda v: v.T,
        "broadcast": lambda v: jnp.broadcast_to(v[:1], (5, 96)),
        "moved": lambda v: jnp.moveaxis(v.reshape(4, 12, 96), 0, -1),
    }
    for name, view in views.items():
        copy = np.array(view(x), order="C")
        for axis in (-1, 0):
            wanted = fp4.quantize(jnp.asarray(copy), axis=axis)
            assert_bytes(wanted, copy, axis)
            same_bytes(fp4.quantize(view(x), axis=axis), wanted)
        same_bytes(jax.jit(lambda v, f=view: fp4.quantize(f(v), axis=0))(x), wanted)
        if name != "broadcast":
            same_bytes(fp4.quantize(view(np.asarray(x)), axis=0), wanted)


def test_a_quantized_array_is_a_pytree_of_plain_arrays() -> None:
    """np.save, pickle, tree_map, device_put and jit keep every byte and all metadata."""
    x = gaussian(41, (3, 17, 35), "bfloat16")
    for format in fp4.FORMATS:
        q = fp4.quantize(x, format, axis=-2)
        leaves, structure = jax.tree.flatten(q)
        stored = io.BytesIO()
        np.savez(stored, *[np.asarray(leaf) for leaf in leaves])
        stored.seek(0)
        loaded = np.load(stored)
        back = jax.tree.unflatten(
            structure, [jnp.asarray(loaded[f"arr_{i}"]) for i in range(len(leaves))]
        )
        copies = [back, pickle.loads(pickle.dumps(q)), jax.tree.map(lambda v: v, q)]
        copies += [jax.device_put(q), jax.jit(lambda v: v)(q), jax.tree.map(np.asarray, q)]
        for copy in copies:
            same_bytes(copy, q)
            assert (copy.shape, copy.format, copy.axis, copy.length, copy.dtype) == (
                (3, 17, 35), format, -2, 17, jnp.bfloat16,
            )  # fmt: skip
            same_bytes(fp4.dequantize(copy), fp4.dequantize(q))


def test_vmap_and_scan_take_a_quantized_array_apart() -> None:
    """Static metadata names no leading sizes: a stack can be mapped and scanned over."""
    x = gaussian(42, (4, 6, 40))
    stacked = jax.vmap(fp4.quantize)(x)
    assert stacked.shape == (4, 6, 40)
    whole = jax.vmap(fp4.dequantize)(stacked)
    _, scanned = jax.lax.scan(lambda carry, q: (carry, fp4.dequantize(q)), 0, stacked)
    for i in range(4):
        one = fp4.dequantize(fp4.quantize(x[i]))
        same_bytes(whole[i], one)
        same_bytes(scanned[i], one)
    assert stacked.nbytes == 4 * (6 * 32 + 6 * 3 + 4)


def test_tiled_scales_are_a_permutation_of_the_linear_ones() -> None:
    """linear_scales() of a tiled array, made by hand from the layout's definition."""
    for shape in ((1, 16), (130, 70), (33, 200)):
        q = fp4.quantize(gaussian(50, shape))
        tiled = dataclasses.replace(
            q, layout="tiled", scales=jnp.asarray(pack.tile_scales(np.asarray(q.scales)))
        )
        same_bytes(tiled.linear_scales(), q.scales)
        same_bytes(fp4.dequantize(tiled), fp4.dequantize(q))
        expect_f32(tiled.global_scale, [np.float32(q.global_scale)])
