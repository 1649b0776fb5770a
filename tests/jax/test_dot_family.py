"""The dot family has jax's signatures; what the policy quantizes is the oracle's product.

Contract: for random calls of every function the result has the shape, dtype and weak type of jax's
function of the same name, and arguments that jax refuses are refused with an exception of the same
type. Values lie within the oracle's bound of the quantized product, or are jax's own bits where the
policy leaves the product alone.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from support.dot_signatures import FUNCTIONS, Call, canonical_product, draw, reference_of
from support.jax_reference import gaussian, product_reference, require, same_bytes, widen

RECIPE = fp4.recipes.NVFP4


def generator(function: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(function.encode()), seed])


# ---- Shapes, dtypes, weak types, errors ----------------------------------------------------------


def outcome(call: Call, function: Any, operands: Any) -> Any:
    """(shape, dtype, weak type) of a call, or the type of its error."""
    try:
        aval = jax.eval_shape(lambda: call.run(function, operands))
    except Exception as error:
        return type(error)
    return aval.shape, aval.dtype, aval.weak_type


def compare_signatures(function: str, seed: int, count: int) -> tuple[int, int]:
    """Compares random calls; how many jax refused, and how many results were weak."""
    rng = generator(function, seed)
    refused = weak = 0
    for _ in range(count):
        call = draw(function, rng)
        operands = [spec.make(rng) for spec in call.operands]
        wanted = outcome(call, reference_of(function), operands)
        assert outcome(call, getattr(fp4, function), operands) == wanted, call
        refused += isinstance(wanted, type)
        weak += not isinstance(wanted, type) and wanted[2]
    return refused, weak


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_are_those_of_jax(function: str) -> None:
    """A sample of random calls: ranks, broadcasting, dtypes, weak types, keywords, errors."""
    refused, _ = compare_signatures(function, 0, 30)
    assert 0 < refused < 25


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures_are_those_of_jax_at_length(function: str) -> None:
    """The same for 300 calls of each function."""
    refused, weak = compare_signatures(function, 1, 300)
    assert 10 < refused < 200
    assert weak > 0 or function == "dot_general"


EINSUMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("ij,jk", (3, 4), (4, 5)), {}),
    (("...ij,jk->...ik", (2, 7, 3, 4), (4, 5)), {}),
    (("...ij,...jk", (2, 1, 3, 4), (6, 4, 5)), {}),
    (("ii,ij->j", (4, 4), (4, 5)), {}),
    (("iij,jk->ik", (3, 3, 4), (4, 5)), {}),
    (("ijx,jky->ik", (3, 4, 2), (4, 5, 3)), {}),
    (("ij,jk,kl->il", (3, 4), (4, 5), (5, 6)), {}),
    (("ij,jk,kl,lm->im", (3, 4), (4, 5), (5, 6), (6, 2)), {"optimize": False}),
    (("ij,jk,kl->il", (3, 4), (4, 5), (5, 6)), {"optimize": [(1, 2), (0, 1)]}),
    (("ij,jk,ik->", (3, 4), (4, 5), (3, 5)), {"optimize": "greedy"}),
    (("ij,jk->ik", (3, 1), (4, 5)), {}),
    (("ij,kj->ik", (3, 4), (5, 1)), {}),
    (("ijx,kjx->ik", (3, 4, 8), (5, 1, 8)), {}),
    (("ij->ji", (3, 4)), {}),
    (("ii->", (4, 4)), {}),
    (("i,j->ij", (4,), (5,)), {}),
    ((",ij->ij", (), (4, 5)), {}),
    (("ij,jk", (3, 4), (5, 5)), {}),
    (("ij,jk", (3, 4)), {}),
    (("ij,jk->iZ", (3, 4), (4, 5)), {}),
    (("ijk,jk->i", (3, 4), (4, 5)), {}),
    (("ij,jk->ik", (3, 4), (4, 5)), {"out": 1}),
    (("ij,jk,kl->il", (3, 4), (4, 5), (5, 6)), {"optimize": [(0, 1, 2)]}),
    (("ij,jk->ik", (3, 4), (4, 5)), {"preferred_element_type": jnp.dtype("bfloat16")}),
]


@pytest.mark.parametrize(("args", "keywords"), EINSUMS, ids=lambda v: str(v)[:60])
def test_every_form_of_einsum_has_the_signature_of_jax(args: Any, keywords: Any) -> None:
    """Ellipsis, diagonals, own indices, implicit results, paths, broadcasting, errors."""
    subscripts, *shapes = args
    for dtypes in (("float32",) * 4, ("bfloat16", "float32", "bfloat16", "int32")):
        operands = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
        call = Call("einsum", (), (subscripts,), (), keywords)
        wanted = outcome(call, jnp.einsum, operands)
        assert outcome(call, fp4.einsum, operands) == wanted
    if len(shapes) == 2 and "." not in subscripts and "Z" not in subscripts and not keywords:
        left, right = subscripts.split("->")[0].split(",")
        result = [ord(c) for c in subscripts.split("->")[1]] if "->" in subscripts else None
        interleaved = (operands[0], [ord(c) for c in left], operands[1], [ord(c) for c in right])
        interleaved += () if result is None else (result,)
        call = Call("einsum", ())
        assert outcome(call, fp4.einsum, interleaved) == outcome(call, jnp.einsum, interleaved)


# ---- Values --------------------------------------------------------------------------------------


def compare_values(function: str, seed: int, count: int) -> tuple[int, int]:
    """Compares random valid calls; how many were quantized, and how many left to jax."""
    rng = generator(function, seed)
    quantized = left_alone = 0
    for _ in range(count):
        call = draw(function, rng, valid=True)
        operands = [spec.make(rng) for spec in call.operands]
        got = call.run(getattr(fp4, function), operands)
        product = canonical_product(call, operands)
        if product.terms < 2:
            same_bytes(got, call.run(reference_of(function), operands))
            left_alone += 1
            continue
        assert call.names is not None
        y = product.of_result(got, call.names[2])
        wanted = product_reference(
            product.a, product.b, np.asarray(got).dtype.name, RECIPE, has_batch=bool(product.batch)
        )
        require(wanted, y)
        quantized += 1
    return quantized, left_alone


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_the_oracles(function: str) -> None:
    """A sample of random calls, eagerly."""
    quantized, _ = compare_values(function, 2, 6)
    assert quantized >= 2


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_the_oracles_at_length(function: str) -> None:
    """The same for 200 calls of each function."""
    quantized, left_alone = compare_values(function, 3, 200)
    assert quantized > 100 and left_alone > 0


def test_einsum_of_three_operands_is_two_products() -> None:
    """In the order that jax plans: a product of products, bit for bit."""
    a, b, c = gaussian(1, (9, 40)), gaussian(2, (40, 33)), gaussian(3, (33, 5))
    path, _ = jnp.einsum_path("ij,jk,kl->il", a, b, c)
    assert path[0] in ((0, 1), (1, 2))
    planned = fp4.einsum("ij,jk,kl->il", a, b, c)
    first_two = fp4.dot(fp4.dot(a, b), c)
    last_two = fp4.dot(a, fp4.dot(b, c))
    same_bytes(planned, last_two if path[0] == (1, 2) else first_two)
    same_bytes(fp4.einsum("ij,jk,kl->il", a, b, c, optimize=[(0, 1), (0, 1)]), first_two)
    same_bytes(fp4.einsum("ij,jk,kl->il", a, b, c, optimize=[(1, 2), (0, 1)]), last_two)


def test_own_indices_and_diagonals_are_summed_before_quantization() -> None:
    """'iijx,jky->ik' is a dot of the diagonal's and the own indices' sums."""
    a, b = gaussian(4, (6, 6, 20, 2)), gaussian(5, (20, 7, 3))
    plain = fp4.dot(jnp.einsum("iijx->ij", a), jnp.einsum("jky->jk", b))
    same_bytes(fp4.einsum("iijx,jky->ik", a, b), plain)
    c, d = gaussian(13, (3, 4, 40)), gaussian(14, (5, 1, 40))  # a size of 1 is broadcast
    same_bytes(fp4.einsum("ijx,kjx->ik", c, d), fp4.inner(c.sum(1), d[:, 0]))


# ---- The policy ----------------------------------------------------------------------------------

ONES = {name: jnp.ones((4, 40), name) for name in ("int32", "bool", "complex64", "float8_e4m3fn")}


@pytest.mark.parametrize("kind", ONES)
def test_what_is_no_float_is_left_to_jax(kind: str) -> None:
    """Integers, truth values, complex and 8-bit floats: jax's own result, in its dtype."""
    x = ONES[kind]
    w = x.T
    same_bytes(fp4.dot(x, w), jnp.dot(x, w))
    same_bytes(fp4.einsum("ij,jk", x, w), jnp.einsum("ij,jk", x, w))


def test_integers_beside_floats_are_quantized() -> None:
    """They become floats by promotion; the float operand's dtype is that of the result."""
    x, w = jnp.arange(-60, 60).reshape(3, 40), gaussian(6, (40, 5), "bfloat16")
    got = fp4.dot(x, w)
    assert got.dtype == jnp.bfloat16
    same_bytes(got, fp4.dot(x.astype(jnp.float32), w, preferred_element_type=jnp.bfloat16))
    (dw,) = jax.vjp(lambda w: fp4.dot(x, w), w)[1](got)
    assert dw.dtype == w.dtype and (widen(dw) != 0).any()


@pytest.mark.parametrize("terms", [0, 1, 2])
def test_outer_products_are_left_to_jax(terms: int) -> None:
    """Where nothing is summed nothing is gained: the exact product, with jax's gradients."""
    x, w = gaussian(7, (5, terms)), gaussian(8, (terms, 6))
    same = np.array_equal(np.asarray(fp4.dot(x, w)), np.asarray(jnp.dot(x, w)))
    assert same == (terms < 2)
    own = fp4.Recipe("own", *[fp4.Operand(fp4.NVFP4)] * 6, min_contraction=0)
    if terms == 1:
        same_bytes(fp4.einsum("i,j->ij", x[:, 0], w[0]), jnp.outer(x[:, 0], w[0]))
        assert not np.array_equal(fp4.dot(x, w, recipe=own), jnp.dot(x, w))
        mine, jaxs = (jax.grad(lambda x, f=f: (f(x, w) ** 2).sum())(x) for f in (fp4.dot, jnp.dot))
        same_bytes(mine, jaxs)


def test_a_recipe_says_from_which_contraction_on() -> None:
    """min_contraction=64: 63 terms are jax's, 64 are quantized."""
    own = fp4.Recipe("own", *[fp4.Operand(fp4.NVFP4)] * 6, min_contraction=64)
    for terms in (63, 64):
        x, w = gaussian(9, (5, terms)), gaussian(10, (terms, 6))
        same = np.array_equal(fp4.matmul(x, w, recipe=own), jnp.matmul(x, w))
        assert same == (terms == 63)


def test_float64_is_left_to_jax() -> None:
    """With x64 enabled, products with a float64 operand or result keep all their bits."""
    with jax.enable_x64(True):
        x, w = np.random.default_rng(0).standard_normal((2, 5, 40)), np.ones((40, 3), np.float32)
        got = fp4.matmul(x, w)
        assert got.dtype == jnp.float64
        same_bytes(got, jnp.matmul(x, w))
        x = x.astype(np.float32)
        same_bytes(
            fp4.matmul(x, w, preferred_element_type=np.float64),
            jnp.matmul(x, w, preferred_element_type=np.float64),
        )
        assert fp4.matmul(x, w).dtype == jnp.float32


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unknown_keywords_and_algorithms_are_refused(function: str) -> None:
    """Nothing is ignored: a misspelt keyword is a TypeError, an explicit algorithm a ValueError."""
    rng = generator(function, 5)
    call = draw(function, rng, valid=True)
    operands = [spec.make(rng) for spec in call.operands]
    ours = getattr(fp4, function)
    for keyword in ("out_shardings", "_dot_general", "prefered_element_type"):
        with pytest.raises(TypeError, match=keyword):
            ours(*call.before, *operands, *call.after, **{keyword: None})
    if "precision" in ours.__kwdefaults__ or function == "dot_general":
        for algorithm in ("F32_F32_F32", jax.lax.DotAlgorithmPreset.F16_F16_F32):
            with pytest.raises(ValueError, match=r"`precision`.*algorithm"):
                ours(*call.before, *operands, *call.after, precision=algorithm)


def test_out_sharding_on_an_explicit_mesh() -> None:
    """The result has the sharding that was asked for; its gradient flows."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, w = gaussian(11, (8, 40)), gaussian(12, (40, 6))
    wanted = fp4.dot(x, w)
    with jax.set_mesh(mesh):
        spec = jax.NamedSharding(mesh, jax.P("d", None))
        for call in (
            lambda x: fp4.dot(x, w, out_sharding=spec),
            lambda x: fp4.dot_general(x, w, (((1,), (0,)), ((), ())), out_sharding=spec),
            lambda x: fp4.einsum("ij,jk->ik", x, w, out_sharding=spec),
        ):
            got = jax.jit(call)(x)
            assert jax.typeof(got).sharding.spec == jax.P("d", None)
            same_bytes(jax.device_get(got), jax.device_get(wanted))
            assert jax.grad(lambda x, f=call: f(x).sum())(x).shape == x.shape
    with pytest.raises(ValueError, match=r"jax_fp4\.dot"):
        fp4.dot(x, w, out_sharding=jax.P("nowhere", None))
