"""Options and parts that are fine by themselves and wrong together.

Contract: a clear Python error before anything runs; where a value is known only at run time, NaN.
"""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4

X = jnp.asarray(np.random.default_rng(0).standard_normal((32, 64)), jnp.float32)


def test_a_rotated_operand_needs_a_rotated_partner() -> None:
    """The transform cancels only if both sides have it, with the same signs."""
    signs = [1] * 15 + [-1]
    plain, rotated, other = (fp4.quantize(X, hadamard=h) for h in (False, True, signs))
    for a, b in ((plain, rotated), (rotated, plain), (rotated, other)):
        with pytest.raises(ValueError, match=r"scaled_matmul: `b` must be rotated like a"):
            fp4.scaled_matmul(a, b)
    product = fp4.scaled_matmul(rotated, rotated)
    error = np.linalg.norm(product - X @ X.T) / np.linalg.norm(X @ X.T)
    assert error < 0.2


def test_recipes_compare_signs_not_spellings() -> None:
    """True and the default signs written out are one rotation."""
    default = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
    fp4.Recipe(
        "mixed spellings",
        fprop_x=fp4.Operand(fp4.NVFP4, hadamard=True),
        fprop_w=fp4.Operand(fp4.NVFP4, hadamard=default),
    )
    with pytest.raises(ValueError, match=r"fprop_w.hadamard"):
        fp4.Recipe(
            "different signs",
            fprop_x=fp4.Operand(fp4.NVFP4, hadamard=True),
            fprop_w=fp4.Operand(fp4.NVFP4, hadamard=(1,) * 16),
        )


@pytest.mark.parametrize("amax", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("format", [fp4.NVFP4, fp4.FP8_E4M3])
def test_an_impossible_traced_amax_gives_nan(amax: float, format: fp4.Format) -> None:
    """Known values raise; under jit everything that is quantized with it decodes to NaN."""
    with pytest.raises(ValueError, match=r"`amax`"):
        fp4.quantize(X, format, amax=amax)
    values = jax.jit(lambda a: fp4.dequantize(fp4.quantize(X, format, amax=a)))(jnp.float32(amax))
    assert np.isnan(values).all()


@pytest.mark.parametrize("amax", [1e300, 1e-300])
def test_an_amax_beyond_float32_is_refused(amax: float) -> None:
    """Neither Inf nor 0 was meant."""
    with pytest.raises(ValueError, match=r"`amax` must be a number that float32 holds"):
        fp4.quantize(X, amax=amax)


def test_a_given_amax_is_not_reduced() -> None:
    """amax_axes says how to measure, amax that nothing is measured."""
    with pytest.raises(ValueError, match=r"`amax_axes` must be None where amax is given"):
        jax.vmap(lambda x: fp4.quantize(x[None], amax=1.0, amax_axes="i"), axis_name="i")(X)


def test_foreign_byte_order_is_refused() -> None:
    """NumPy calls it float32 as well."""
    foreign = np.asarray(X).astype(np.dtype(np.float32).newbyteorder("S"))
    for call in (fp4.quantize, lambda x: fp4.dot(x, X.T)):
        with pytest.raises(TypeError, match=r"byte order"):
            call(foreign)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fp4.quantize_both(X, row=3),
        lambda: fp4.quantize(X, hadamard=np.ones((16, 1))),
        lambda: fp4.dot_general(X, X, (((1.7,), (1,)), ((), ()))),
        lambda: fp4.dot([[1.0, 2.0]], X),
        lambda: fp4.dot(X, X.T, precision=3),
        lambda: fp4.dot(X, X.T, precision=["high", "high"]),
        lambda: fp4.Recipe(3),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(call: object) -> None:
    """Each message names the function's argument, what was expected and what came."""
    with pytest.raises((TypeError, ValueError), match=r"jax_fp4\..*`.*` must be .*, got "):
        call()  # pyright: ignore[reportCallIssue]


def test_hand_built_arrays_are_checked() -> None:
    """Every static part of a BlockScaledArray that a consumer relies on."""
    q = fp4.quantize(X)
    parts = {name: getattr(q, name) for name in q.__dataclass_fields__}
    for name, bad in (
        ("layout", "foo"),
        ("format", None),
        ("length", "a"),
        ("axis", 7),
        ("scales", None),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"q\.{name}"):
            fp4.dequantize(fp4.BlockScaledArray(**{**parts, name: bad}))


def test_quantized_arrays_compare_by_identity_and_survive_copies() -> None:
    """== of arrays inside a dataclass has no truth value; copies keep every part."""
    q = fp4.quantize(X, hadamard=True)
    assert q == q and q != fp4.quantize(X, hadamard=True) and isinstance(hash(q), int)
    for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert twin.signs == q.signs and twin.format == q.format
        np.testing.assert_array_equal(twin.values, q.values)
