"""Seeds from the data and from keys, and the random bits they give.

Contract: without a key the seed is a fixed function of the cotangent's bits and shape, different at
every step; a key is taken as its 64 bits, wider ones xor-folded; streams and block numbers keep
uses of one seed apart; stochastic rounding is unbiased up to its 8 random bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from oracles import quantizer, tables
from support.jax_reference import (
    DTYPES,
    bits,
    data_seed,
    encode,
    fingerprint,
    gaussian,
    same_bytes,
    widen,
)

SR = fp4.Operand(fp4.NVFP4, rounding="stochastic")
NEAREST = fp4.Operand(fp4.NVFP4)
# Random bits on both copies of dy and no rotation, so that each can be read back.
PLAIN = fp4.Recipe("plain", NEAREST, NEAREST, SR, NEAREST, SR, NEAREST)
EYE = jnp.eye(48)


def copies_of_dy(dy: Any, key: Any = None, recipe: fp4.Recipe = PLAIN) -> tuple[Any, Any]:
    """What dgrad and wgrad see of dy: the gradients where both operands are identities."""
    _, back = jax.vjp(
        lambda a, b: fp4.dot(a, b, recipe=recipe, key=key, preferred_element_type=dy.dtype),
        EYE,
        EYE,
    )
    dx, dw = back(dy)  # dy . I and I . dy: the identity and its scales are exact
    return dx, dw


def stochastic(dy: Any, seed: tuple[int, int], stream: int, axis: int) -> np.ndarray:
    """The oracle's copy of dy, dequantized and turned back."""
    q = quantizer.quantize(
        widen(dy), "NVFP4", axis=axis, rounding="stochastic", seed=seed, stream=stream
    )
    values = q.dequantize()
    return values if axis == 1 else values.T


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_seed_is_the_documented_function_of_the_cotangent(dtype: str) -> None:
    """Fingerprint, salt and mix in NumPy give the random bits of both gradients."""
    dy = gaussian(1, (48, 48), dtype)
    dx, dw = copies_of_dy(dy)
    seed = data_seed(np.asarray(dy)[None])
    np.testing.assert_allclose(np.asarray(dx), stochastic(dy, seed, 0, 1), rtol=3e-7)
    np.testing.assert_allclose(np.asarray(dw), stochastic(dy, seed, 1, 0), rtol=3e-7)


def test_ten_thousand_steps_have_ten_thousand_seeds() -> None:
    """At least 9,990 distinct seeds in 10,000 bf16 gaussian gradients, under one vmap."""
    steps = gaussian(0, (10_000, 2, 16), "bfloat16")
    seeds = [data_seed(step[None]) for step in np.asarray(steps)]
    assert len(set(seeds)) >= 9_990
    eye = jnp.eye(16, dtype=jnp.bfloat16)

    def dx(dy: Any) -> Any:
        x = jnp.zeros((2, 16))
        pull = jax.vjp(lambda a: fp4.dot(a, eye, recipe=PLAIN, preferred_element_type=dy.dtype), x)[
            1
        ]
        return pull(dy)[0]

    got = np.asarray(jax.jit(jax.vmap(dx))(steps))
    for i in range(0, 10_000, 97):  # each step used its own seed
        np.testing.assert_allclose(got[i], stochastic(steps[i], seeds[i], 0, 1), rtol=3e-7)


def test_seeds_of_small_changes_differ() -> None:
    """One bit of one element, two elements swapped, another shape: another seed."""
    words = np.asarray(bits(gaussian(2, (4, 6)))).copy()
    seeds = [data_seed(words[None]), data_seed(words.reshape(1, 6, 4))]
    for bit in range(32):
        changed = words.copy()
        changed[1, 2] ^= np.uint32(1 << bit)
        seeds.append(data_seed(changed[None]))
    swapped = words.copy()
    swapped[0, 0], swapped[3, 5] = words[3, 5], words[0, 0]
    seeds.append(data_seed(swapped[None]))
    assert len(set(seeds)) == len(seeds)
    assert fingerprint(words) == sum(
        int(w) * (2 * i + 1) for i, w in enumerate(words.reshape(-1))
    ) % (1 << 32)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_folded_to_two_words(implementation: str) -> None:
    """A typed key, its raw words, and the folded words as `seed` give the same bytes."""
    key = jax.random.key(1234567, impl=implementation)
    words = np.asarray(jax.random.key_data(key)).reshape(-1, 2)
    folded = np.bitwise_xor.reduce(words, axis=0)
    x = gaussian(3, (8, 64))
    wanted = fp4.quantize(x, rounding="stochastic", seed=jnp.asarray(folded))
    same_bytes(fp4.quantize(x, rounding="stochastic", key=key), wanted)
    same_bytes(fp4.quantize(x, rounding="stochastic", key=jax.random.key_data(key)), wanted)
    low, high = (int(w) for w in folded)
    q = quantizer.quantize(widen(x), "NVFP4", rounding="stochastic", seed=(low, high))
    np.testing.assert_array_equal(np.asarray(wanted.codes()), q.codes)


def test_a_key_seeds_both_gradients_and_nothing_else() -> None:
    """dx and dw are those of the key's words; y is not touched; two keys differ."""
    dy = gaussian(4, (48, 48))
    keys = jax.random.split(jax.random.key(0))
    results = [copies_of_dy(dy, key) for key in keys]
    for key, (dx, dw) in zip(keys, results, strict=True):
        low, high = (int(w) for w in jax.random.key_data(key))
        np.testing.assert_allclose(np.asarray(dx), stochastic(dy, (low, high), 0, 1), rtol=3e-7)
        np.testing.assert_allclose(np.asarray(dw), stochastic(dy, (low, high), 1, 0), rtol=3e-7)
    for first, second in zip(*results, strict=True):
        assert (np.asarray(first) != np.asarray(second)).mean() > 0.2
    x, w = gaussian(5, (9, 48)), gaussian(6, (48, 9))
    same_bytes(fp4.dot(x, w, key=keys[0]), fp4.dot(x, w, key=keys[1]))


def test_dgrad_and_wgrad_draw_different_bits() -> None:
    """A constant symmetric dy is rounded differently in its two copies."""
    dy = jnp.full((48, 48), 1.25).at[:, ::16].set(6.0).at[::16].set(6.0)
    dy = jnp.maximum(dy, dy.T)
    dx, dw = copies_of_dy(dy, jax.random.key(7))
    assert (np.asarray(dx) != np.asarray(dw)).mean() > 0.2
    assert (np.asarray(dx) != np.asarray(dw).T).mean() > 0.2


def test_streams_seeds_and_block_numbers_keep_uses_apart() -> None:
    """Equal rows under one seed are rounded differently, and so are streams and seeds."""
    x = jnp.full((64, 32), 1.25).at[:, ::16].set(6.0)
    seed = jnp.array([1, 2], jnp.uint32)

    def codes(**options: Any) -> np.ndarray:
        q = fp4.quantize(x, rounding="stochastic", amax=2688.0, **options)
        return np.asarray(q.codes())

    base = codes(seed=seed)
    assert len({row.tobytes() for row in base.reshape(-1, 16)}) > 120  # of 128 blocks
    others = [codes(seed=seed, stream=1), codes(seed=seed, stream=2**32 - 1)]
    others += [codes(seed=seed[::-1]), codes(seed=jnp.array([1, 3], jnp.uint32))]
    others += [codes(seed=jnp.array([3, 2], jnp.uint32))]
    for i, other in enumerate(others):
        for earlier in [base, *others[:i]]:
            assert (other != earlier).mean() > 0.2


def test_the_noise_changes_from_layer_to_layer_of_a_scan() -> None:
    """A scan over equal layers does not repeat the bits: the cotangents and keys differ."""
    dy = jnp.full((3, 16, 48), 1.25).at[:, :, ::16].set(6.0)
    keys = jax.random.split(jax.random.key(1), 3)

    def step(carry: Any, inputs: Any) -> Any:
        return carry, fp4.quantize(
            inputs[0], rounding="stochastic", key=inputs[1], amax=2688.0
        ).codes()

    _, layers = jax.lax.scan(step, 0, (dy, keys))
    for i in range(3):
        assert (np.asarray(layers[i]) != np.asarray(layers[i - 1])).mean() > 0.2


# ---- Unbiasedness --------------------------------------------------------------------------------


def draws(format: fp4.Format, value: float, count: int, seed: int) -> np.ndarray:
    """`count` stochastic roundings of `value`, in blocks whose scale is 1."""
    per_row = format.block - 1
    x = np.full((-(-count // per_row), format.block), value, np.float32)
    x[:, 0] = format.element_max
    amax = {"ue4m3": 2688.0, "unit": format.element_max, "ue8m0": None}[format.scale]
    q = fp4.quantize(
        jnp.asarray(x), format, rounding="stochastic", amax=amax,
        seed=jnp.array([seed, 77], jnp.uint32),
    )  # fmt: skip
    values = tables.VALUES[format.element][np.asarray(q.codes())[:, 1:]]
    return values.reshape(-1)[:count]


@pytest.mark.parametrize("value", [0.3, 1.7, 2.2, 5.1, -0.3, -5.1])
@pytest.mark.parametrize("format", [fp4.NVFP4, fp4.MXFP4, fp4.MXFP8_E4M3], ids=str)
def test_the_mean_of_many_roundings_is_the_value(format: fp4.Format, value: float) -> None:
    """10**5 draws: within 4.5 sigma of the value that 8 random bits can represent."""
    got = draws(format, value, 100_000, 1)
    below, above = got.min(), got.max()
    assert below < value < above
    step = above - below
    fraction = (abs(value) - min(abs(below), abs(above))) / step
    reachable = np.floor(np.float32(fraction) * 256) / 256
    expected = np.sign(value) * (min(abs(below), abs(above)) + reachable * step)
    sigma = step * np.sqrt(reachable * (1 - reachable) / got.size)
    assert abs(got.mean() - expected) < 4.5 * sigma
    assert abs(got.mean() - value) < 4.5 * sigma + step / 256
    assert set(np.unique(got)) == {below, above}


def test_every_fraction_rounds_up_as_often_as_it_should() -> None:
    """2 + k/256 goes to 3 with probability k/256 for each k; k = 0 never moves; signs mirror."""
    count = 3_000
    for k in range(0, 256, 15):
        got = draws(fp4.NVFP4, 2 + k / 256, count, 100 + k)
        mirrored = draws(fp4.NVFP4, -2 - k / 256, count, 100 + k)
        np.testing.assert_array_equal(mirrored, -got)
        ups = (got == 3).sum()
        assert ups + (got == 2).sum() == count
        deviation = np.sqrt(count * (k / 256) * (1 - k / 256))
        assert abs(ups - count * k / 256) <= 5 * deviation


@pytest.mark.parametrize("format", fp4.FORMATS, ids=str)
def test_representable_values_never_move(format: fp4.Format) -> None:
    """Codes of the format itself are kept under every random byte."""
    grid = tables.MAGNITUDES[format.element].astype(np.float64)
    grid = grid[grid * 2**7 >= 1]  # in range of f32 products with a scale of 1
    x = np.tile(np.resize(grid, format.block), (50, 1)).astype(np.float32)
    x[:, 0] = format.element_max
    amax = {"ue4m3": 2688.0, "unit": format.element_max, "ue8m0": None}[format.scale]
    q = fp4.quantize(
        encode(x, "float32"), format, rounding="stochastic", amax=amax, key=jax.random.key(2)
    )
    np.testing.assert_array_equal(tables.VALUES[format.element][np.asarray(q.codes())], x)


def test_gradients_of_a_recipe_without_stochastic_rounding_need_no_seed() -> None:
    """Rounded to nearest, a key changes nothing."""
    recipe = dataclasses.replace(PLAIN, dgrad_dy=NEAREST, wgrad_dy=NEAREST)
    dy = gaussian(8, (48, 48))
    same_bytes(copies_of_dy(dy, None, recipe), copies_of_dy(dy, jax.random.key(1), recipe))
