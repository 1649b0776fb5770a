"""explain: which products a function runs, how each of them is run, and why.

It reads the jaxpr of the function, so it sees what is compiled: also what jax's transformations
have added, and functions that were traced before. The named scopes of contraction.py and product.py
say which call a product belongs to.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend

from jax_fp4.formats import FORMATS, Format

_OURS = ("jax_fp4_scaled_matmul", "jax_fp4_grouped_matmul")
_JAX = ("dot_general", "ragged_dot_general")
_SCALAR = "jax_fp4.inner.as_it_is."  # jnp.inner multiplies scalars without a dot
_CALL = re.compile(r"jax_fp4\.(\w+)\.([\w-]+)(?:\.([\w-]+))?")
_ROLE = re.compile(r"\b(fprop|dgrad|wgrad)\b")
_DECODED = re.compile(r"\bdecoded\.(\w+)\.(\w+)")
_STATIC = re.compile(r"\bstatic_amax\b")


@dataclasses.dataclass(frozen=True)
class ExplainedProduct:
    """One product of matrices that a function runs.

    Attributes:
        function: which function of `jax_fp4` it belongs to.
        role: "fprop", "dgrad" or "wgrad"; "" for a product that is left to jax and its gradients.
        path: "quantized" (our kernels), "bfloat16" (the recipe leaves this product unquantized),
            "decoded" (the same, and the weight is stored quantized), or "jax" (the policy leaves it
            as it is).
        why: the recipe for the first two; what the policy says for the last.
        shape: (batch, M, N, K). Groups of ragged_dot count as batch; quantized ones lie in whole
            tiles of 128 rows, which M, or K in a gradient of weights, counts all.
        padded: (M, N, K) as the kernels read them: rows of scales and packed rows are padded.
        left: format or dtype of the left operand; "NVFP4 static" where its amax is given;
            "NVFP4 as bfloat16" where it is decoded.
        right: as ``left``.
        result: dtype of the result.
        nbytes: bytes of both operands, with their scales and padding, and of the result.
        times: how often it runs: the length of every scan around it; None inside a while loop.
    """

    function: str
    role: str
    path: str
    why: str
    shape: tuple[int, int, int, int]
    padded: tuple[int, int, int]
    left: str
    right: str
    result: str
    nbytes: int
    times: int | None


class Explanation(tuple[ExplainedProduct, ...]):
    """The products of a function, in the order of its program; prints as a table."""

    def __str__(self) -> str:
        """One line a product."""
        head = ("function", "role", "path", "why", "batch x M x N x K", "padded to", "operands",
                "result", "bytes", "times")  # fmt: skip
        rows = [head] + [
            (
                p.function,
                p.role or "-",
                p.path,
                p.why,
                " x ".join(map(str, p.shape)),
                " x ".join(map(str, p.padded)),
                f"{p.left}, {p.right}",
                p.result,
                str(p.nbytes),
                "?" if p.times is None else str(p.times),
            )
            for p in self
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def explain(function: Callable[..., Any]) -> Callable[..., Explanation]:
    """Shows the products that a function runs, without running it.

    ``print(explain(f)(*args))`` lists every product of `dot` and its relatives, and of
    `scaled_matmul`, in ``f(*args)``: shape, formats, padding and bytes, whether it is quantized,
    and why or why not. Wrap the gradient, ``explain(jax.grad(f))``, to see the backward pass too.
    Products that do not go through `jax_fp4` are not listed.

    Args:
        function: whatever `jax.make_jaxpr` takes.

    Returns:
        A function of the same arguments (arrays, or `jax.ShapeDtypeStruct` in their place) that
        returns an `Explanation`.
    """

    def explained(*args: Any, **keywords: Any) -> Explanation:
        jaxpr = jax.make_jaxpr(function)(*args, **keywords)
        return Explanation(_products(jaxpr.jaxpr, "", 1))

    return explained


def _products(jaxpr: Any, above: str, times: int | None) -> Iterator[ExplainedProduct]:
    for equation in jaxpr.eqns:
        stack = f"{above}/{equation.source_info.name_stack}"
        name = equation.primitive.name
        if name in _OURS:
            yield _quantized(equation, stack, times)
        elif name in _JAX or (name == "mul" and _SCALAR in stack):
            call = _CALL.search(stack)
            if call is not None:
                yield _as_it_is(equation, stack, call, times)
        inner = times
        if name == "scan":
            inner = None if times is None else times * equation.params["length"]
        elif name == "while":
            inner = None
        for nested in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _products(nested, stack, inner)


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007
        pass
    return found


def _role(stack: str) -> str:
    found = _last(_ROLE, stack)
    return found[1] if found else ""


def _format(attribute: str) -> Format:
    return next(f for f in FORMATS if attribute.startswith(f.attribute() + " "))


def _nbytes(*variables: Any) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


def _quantized(equation: Any, stack: str, times: int | None) -> ExplainedProduct:
    params = equation.params
    a, b = (_format(params[name]) for name in "ab")
    (out,) = equation.outvars
    batch, m, n = out.aval.shape
    if params.get("grouping") == "rows":
        batch *= params["groups"]
    k = params["k"]
    tiled = ["layout=tiled" in params[name] for name in "ab"]
    rows = [-(-size // 128) * 128 if t else size for size, t in zip((m, n), tiled, strict=True)]
    # A packed row is padded to a whole number of the bytes that tensor maps step by.
    length = max(8 * f.row_bytes(k) // f.bits for f in (a, b))
    call = _last(_CALL, stack)
    return ExplainedProduct(
        function=call[1] if call else "scaled_matmul",
        role=_role(stack) if call else "",
        path="quantized",
        why=f"recipe {call[2]}" if call else "quantized operands",
        shape=(batch, m, n, k),
        padded=(rows[0], rows[1], length),
        left=f"{a.name} static" if _STATIC.search(stack) else a.name,
        right=b.name,
        result=out.aval.dtype.name,
        nbytes=_nbytes(*equation.invars, out),
        times=times,
    )


def _as_it_is(
    equation: Any, stack: str, call: re.Match[str], times: int | None
) -> ExplainedProduct:
    lhs, rhs = equation.invars[:2]
    (out,) = equation.outvars
    stays = call[2] == "as_it_is"
    names = [lhs.aval.dtype.name, rhs.aval.dtype.name]
    stored = _last(_DECODED, stack)
    if stored is not None:
        pairs = zip(names, stored.groups(), strict=True)
        names = [name if name == format else f"{format} as {name}" for name, format in pairs]
    shape = _shape(equation)
    return ExplainedProduct(
        function=call[1],
        role="" if stays else _role(stack),
        path="jax" if stays else "bfloat16" if stored is None else "decoded",
        why=call[3].replace("_", " ") if stays else f"recipe {call[2]}",
        shape=shape,
        padded=shape[1:],
        left=names[0],
        right=names[1],
        result=out.aval.dtype.name,
        nbytes=_nbytes(lhs, rhs, out),
        times=times,
    )


def _shape(equation: Any) -> tuple[int, int, int, int]:
    """(batch, M, N, K) of a product of jax's; groups of a ragged one count as batch."""
    lhs, rhs = (v.aval.shape for v in equation.invars[:2])
    if equation.primitive.name == "mul":
        return 1, math.prod(equation.outvars[0].aval.shape), 1, 1
    numbers = equation.params.get("dimension_numbers")
    groups: tuple[int, ...] = ()
    if numbers is None:
        ragged = equation.params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, tuple(ragged.rhs_group_dimensions)
    (lc, rc), (lb, rb) = numbers
    batch = math.prod(lhs[i] for i in lb) * math.prod(rhs[i] for i in groups)
    k = math.prod(lhs[i] for i in lc)
    m = math.prod(s for i, s in enumerate(lhs) if i not in (*lc, *lb))
    n = math.prod(s for i, s in enumerate(rhs) if i not in (*rc, *rb, *groups))
    return batch, m, n, k
