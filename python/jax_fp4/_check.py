"""Argument checks. Every error text that users see is built here.

An error names the function and argument, what was expected, what came, and the way out. Checks run
at trace time, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def fail(
    where: str,
    argument: str,
    expected: str,
    got: str,
    way_out: str,
    kind: type[Exception] = ValueError,
) -> NoReturn:
    """Raises ``kind`` with the project's one sentence structure."""
    raise kind(f"jax_fp4.{where}: `{argument}` must be {expected}, got {got}; {way_out}")


def missing_extra(module: str, package: str, extra: str, error: ImportError) -> NoReturn:
    """Raises for an optional package that ``module`` of ours needs, and that does not load."""
    raise ImportError(
        f"jax_fp4.{module} needs the package {package}, which does not load: {error}; "
        f"pip install 'jax-fp4[{extra}]'"
    ) from error


def float_array(where: str, argument: str, x: Any, *, min_rank: int = 0) -> jax.Array:
    """``x`` as an array of float32, bfloat16 or float16 and at least ``min_rank`` dimensions."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        fail(where, argument, "an array", type(x).__name__, "pass jnp.asarray(...)", TypeError)
    if x.dtype.name not in FLOAT_DTYPES:
        fail(
            where,
            argument,
            "float32, bfloat16 or float16",
            x.dtype.name,
            "convert it, for example with .astype(jnp.float32)",
            TypeError,
        )
    byte_order(where, argument, x)
    if x.ndim < min_rank:
        fail(
            where,
            argument,
            f"of rank {min_rank} or more",
            f"shape {x.shape}",
            "add dimensions with jnp.expand_dims",
        )
    return jnp.asarray(x)


def byte_order(where: str, argument: str, x: Any) -> None:
    """``x`` is in the byte order of this machine; NumPy's other one has the same dtype name."""
    if not x.dtype.isnative:
        fail(
            where,
            argument,
            "in the byte order of this machine",
            str(x.dtype),
            'convert it with .astype(x.dtype.newbyteorder("="))',
            TypeError,
        )


def precision(where: str, value: Any) -> None:
    """Precision values say nothing about a quantized product and are accepted; algorithms do."""
    for item in value if isinstance(value, tuple) else (value,):
        try:
            jax.lax.Precision(item)  # None, a Precision, or one of JAX's names for it
        except (ValueError, TypeError):
            is_algorithm = isinstance(item, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset, str))
            fail(
                where,
                "precision",
                "None, a jax.lax.Precision, or a tuple of two of them",
                repr(item),
                "an explicit algorithm contradicts a quantized product; use jax.lax.dot_general"
                if is_algorithm
                else "drop it: it has no effect on a quantized product",
            )


def float_dtype(where: str, argument: str, dtype: Any) -> np.dtype:
    """``dtype`` as a NumPy dtype, float32, bfloat16 or float16."""
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        fail(where, argument, "a dtype", repr(dtype), "pass for example jnp.float32", TypeError)
    if result.name not in FLOAT_DTYPES:
        fail(
            where,
            argument,
            "float32, bfloat16 or float16",
            result.name,
            "convert the result afterwards",
            TypeError,
        )
    return result


def one_of(where: str, argument: str, value: Any, choices: Collection[Any]) -> None:
    """``value`` is one of ``choices``."""
    if not any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in choices
    ):
        names = ", ".join(repr(choice) for choice in choices)
        fail(where, argument, f"one of {names}", repr(value), "choose one of these")


def instance(where: str, argument: str, value: Any, kind: type, example: str) -> None:
    """``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        fail(
            where,
            argument,
            f"of type {kind.__name__}",
            f"{type(value).__name__} {value!r:.80}",
            f"pass for example {example}",
            TypeError,
        )


def axis(where: str, value: Any, ndim: int) -> int:
    """``value`` as a negative axis number of an array of rank ``ndim``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        fail(
            where,
            "axis",
            "an int",
            repr(value),
            "name one axis, the one that is contracted",
            TypeError,
        )
    if not -ndim <= value < ndim:
        fail(
            where,
            "axis",
            f"between {-ndim} and {ndim - 1} for an array of rank {ndim}",
            str(value),
            "name the axis that is contracted",
        )
    return int(value) - ndim if value >= 0 else int(value)


def signs(where: str, argument: str, value: Any, default: int) -> int | None:
    """The Hadamard option as a bit mask of the negative signs, or None where it is off."""
    if value is False or value is None:
        return None
    if value is True:
        return default
    is_list = isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)
    items: Sequence[Any] = list(value) if is_list else []
    if len(items) != 16 or any(np.ndim(item) or item not in (1, -1) for item in items):
        fail(
            where,
            argument,
            "True, False or 16 signs, each 1 or -1",
            repr(value),
            "True takes the default signs",
        )
    return sum(1 << i for i, item in enumerate(items) if item == -1)


def copy_options(
    where: str,
    format: Any,
    *,
    scaling: Any,
    rounding: Any,
    rotated: bool,
    scale_rule: Any,
    four_over_six: Any,
) -> None:
    """The options of a quantized copy, each by itself and together with the others."""
    one_of(where, "scaling", scaling, ("1d", "2d"))
    one_of(where, "rounding", rounding, ("nearest", "stochastic"))
    one_of(where, "scale_rule", scale_rule, ("rceil", "floor"))
    one_of(where, "four_over_six", four_over_six, (True, False))
    if scaling == "2d" and (rotated or format.scale == "unit"):
        why = "hadamard" if rotated else f"format {format}, which has no block scales"
        fail(where, "scaling", f'"1d" with {why}', '"2d"', "drop one of the two")
    if four_over_six and (format.scale != "ue4m3" or rounding == "stochastic"):
        fail(
            where,
            "four_over_six",
            "False but for NVFP4 rounded to nearest",
            f"True for {format} with rounding={rounding!r}",
            "drop four_over_six",
        )
    if scale_rule == "floor" and format.scale != "ue8m0":
        fail(
            where,
            "scale_rule",
            f'"rceil" (the default, without effect) for {format}',
            '"floor"',
            "only MX formats have a choice of rules",
        )


def axis_names(where: str, value: Any) -> tuple[str, ...]:
    """Names of manual mesh axes, each bound where the call is traced."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        fail(where, "amax_axes", "a mesh axis name or several", repr(value), "name them", TypeError)
    for name in names:
        try:
            jax.lax.axis_index(name)
        except NameError:
            fail(
                where,
                "amax_axes",
                "names of mesh axes of an enclosing jax.shard_map or jax.vmap",
                repr(name),
                "outside of them amax is that of the whole array: drop amax_axes",
            )
    return tuple(names)


def amax_value(where: str, given: Any, lead: tuple[int, ...]) -> jax.Array:
    """A given amax as float32 of shape ``lead``; what is known before tracing is checked."""
    way_out = "pass one amax, or one for each leading index"
    if isinstance(given, (int, float, np.generic)) and not isinstance(given, bool):
        with np.errstate(over="ignore"):
            rounded = np.float32(given)
        if not np.isfinite(rounded) or (rounded == 0 and given != 0):
            fail(where, "amax", "a number that float32 holds", repr(given), way_out)
        given = rounded
    if not isinstance(given, (jax.Array, np.ndarray, np.generic)):
        fail(where, "amax", "a float32 scalar or array", type(given).__name__, way_out, TypeError)
    if given.dtype != np.float32 or given.shape not in ((), lead):
        fail(
            where, "amax", f"float32 of shape () or {lead}", f"{given.dtype}{given.shape}", way_out
        )
    if not isinstance(given, jax.core.Tracer):
        values = np.asarray(given)
        if not (np.isfinite(values) & (values >= 0)).all():
            fail(where, "amax", "finite and not negative", str(values), "pass a magnitude")
    return jnp.broadcast_to(jnp.asarray(given), lead)


def stream(where: str, value: Any) -> int:
    """``value`` as a stream number."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not 0 <= value < 2**32
    ):
        fail(
            where,
            "stream",
            "an int in [0, 2**32)",
            repr(value),
            "it is static; use `seed` or `key` for what changes at run time",
        )
    return int(value)


def seed_words(where: str, *, seed: Any, key: Any, needed: bool) -> jax.Array | None:
    """Two uint32 words, low word first, from ``seed`` or ``key``; None where neither was given."""
    if seed is not None and key is not None:
        fail(where, "seed", "given without `key`", "both", "pass one of the two")
    if not needed:
        if seed is not None or key is not None:
            fail(
                where,
                "rounding",
                '"stochastic" where a seed or key is given',
                '"nearest"',
                "drop the seed or ask for stochastic rounding",
            )
        return None
    if key is not None:
        return key_words(where, key)
    if seed is None:
        fail(
            where,
            "seed",
            "two uint32 words (or `key` a jax.random key) for stochastic rounding",
            "neither",
            "pass seed=jnp.array([low, high], jnp.uint32) or key=jax.random.key(0)",
        )
    if (
        not isinstance(seed, (jax.Array, np.ndarray))
        or seed.dtype != np.uint32
        or seed.shape != (2,)
    ):
        got = f"{seed.dtype}{list(seed.shape)}" if hasattr(seed, "shape") else repr(seed)
        fail(
            where,
            "seed",
            "uint32[2], low word first",
            got,
            "pass jnp.array([low, high], jnp.uint32)",
            TypeError if not hasattr(seed, "shape") else ValueError,
        )
    return jnp.asarray(seed)


def key_words(where: str, key: Any) -> jax.Array:
    """A jax.random key (new style or raw uint32) as two words; other widths are xor-folded."""
    data = key
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(key)
    if (
        not isinstance(data, (jax.Array, np.ndarray))
        or data.dtype != np.uint32
        or data.ndim != 1
        or data.size < 2
        or data.size % 2
    ):
        got = f"{data.dtype}{list(data.shape)}" if hasattr(data, "shape") else type(key).__name__
        fail(
            where,
            "key",
            "one jax.random key",
            got,
            "pass jax.random.key(0), or one element of a split key",
            TypeError,
        )
    words = jnp.asarray(data).reshape(-1, 2)
    folded = words[0]
    for i in range(1, words.shape[0]):
        folded = folded ^ words[i]
    return folded
