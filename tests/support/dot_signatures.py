"""Random calls of the dot family: operands as jax sees them, keywords, and what is contracted.

A call is drawn from names of dimensions, so its canonical form, [batch, rows, contracted] on both
sides, is known without asking the code under test.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "bfloat16", "float16")
OTHERS = ("int32", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "weak float32",
          "weak int32", "numpy float64", "python float", "python int")  # fmt: skip
FUNCTIONS = ("dot", "matmul", "dot_general", "einsum", "tensordot", "vdot", "inner", "vecdot",
             "matvec", "vecmat")  # fmt: skip
Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One operand: what it is, and its shape."""

    kind: str
    shape: tuple[int, ...]

    def make(self, rng: np.random.Generator) -> Any:
        """Values that every dtype can hold, so that promotion changes none of them."""
        values = rng.integers(-4, 5, self.shape)
        if self.kind.startswith("python"):
            return float(values) if "float" in self.kind else int(values)
        if self.kind == "numpy float64":
            return np.asarray(values, np.float64)
        if self.kind.startswith("weak"):
            scalar = 1.0 if "float" in self.kind else 1
            return jnp.full(self.shape, scalar)  # of a Python scalar, hence weak
        if self.kind in FLOATS:
            return jnp.asarray(rng.standard_normal(self.shape), self.kind)
        return jnp.asarray(values, jnp.float32).astype(self.kind)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function of the family.

    Attributes:
        function: its name.
        operands: two of them, more for some einsums.
        before: positional arguments in front of the operands.
        after: positional arguments behind them.
        keywords: the rest.
        names: dimensions of lhs, rhs and result; None for what is no plain product of two.
    """

    function: str
    operands: tuple[Spec, ...]
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: tuple[Names, Names, Names] | None = None

    def run(self, function: Callable[..., Any], operands: Any) -> Any:
        """The call with ``function``, which takes jax's arguments."""
        return function(*self.before, *operands, *self.after, **self.keywords)


def reference_of(function: str) -> Callable[..., Any]:
    """jax's function of that name."""
    return getattr(jax.lax if function in ("dot_general", "ragged_dot") else jnp, function)


def _size(rng: np.random.Generator) -> int:
    return int(rng.choice([1, 2, 3, 5]))


def _terms(rng: np.random.Generator) -> int:
    return int(rng.choice([1, 2, 15, 33], p=[0.1, 0.2, 0.3, 0.4]))


def _lead(rng: np.random.Generator, most: int) -> tuple[list[str], list[int], list[str], list[int]]:
    """Leading dimensions that broadcast: names and sizes of both sides."""
    count = int(rng.integers(0, most + 1))
    names = [f"lead{i}" for i in reversed(range(count))]
    sizes = [_size(rng) for _ in names]
    sides: list[Any] = []
    for _ in range(2):
        own = int(rng.integers(0, count + 1))
        cut = count - own
        sides += [names[cut:], [1 if rng.random() < 0.2 else s for s in sizes[cut:]]]
    return tuple(sides)  # type: ignore[return-value]


def _core(function: str, rng: np.random.Generator) -> Any:
    """(before, after, names of lhs, rhs, result, sizes of lhs, rhs) of one call."""
    k = _terms(rng)
    few = lambda: int(rng.integers(0, 3))  # noqa: E731
    if function in ("matmul", "matvec", "vecmat", "vecdot"):
        left, left_sizes, right, right_sizes = _lead(rng, 3)
        cores = {"matmul": (("m", "k"), ("k", "n")), "matvec": (("m", "k"), ("k",)),
                 "vecmat": (("k",), ("k", "n")), "vecdot": (("k",), ("k",))}  # fmt: skip
        a, b = (list(core) for core in cores[function])
        if function == "matmul":  # vectors are allowed, without leading dimensions
            if rng.random() < 0.15:
                a, left, left_sizes = ["k"], [], []
            if rng.random() < 0.15:
                b, right, right_sizes = ["k"], [], []
        sizes = {"m": _size(rng), "n": _size(rng), "k": k}
        longest = left if len(left) > len(right) else right
        out = [*longest, *[n for n in (*a, *b) if n != "k"]]
        own = [[*left_sizes, *(sizes[n] for n in a)], [*right_sizes, *(sizes[n] for n in b)]]
        return (), (), [*left, *a], [*right, *b], out, *own
    free = [[f"{side}{i}" for i in range(few())] for side in "lr"]
    sizes = {n: _size(rng) for group in free for n in group}
    if function in ("dot", "inner"):
        sizes["k"] = k
        left, right = [*free[0], "k"], [*free[1], "k"]
        if function == "dot" and free[1]:
            right = [*free[1][:-1], "k", free[1][-1]]
        out, after = [*free[0], *free[1]], ()
    elif function == "vdot":
        return (), (), ["k"], ["k"], [], [k], [k]
    else:  # tensordot, dot_general, einsum: any order of dimensions
        summed = [f"k{i}" for i in range(int(rng.integers(0, 3)))]
        batch = [f"b{i}" for i in range(few())] if function != "tensordot" else []
        sizes |= {n: _size(rng) for n in batch}
        sizes |= {n: k if i == 0 else 2 for i, n in enumerate(summed)}
        left, right = ([*batch, *summed, *group] for group in free)
        rng.shuffle(left)
        rng.shuffle(right)
        ours = [
            [n for n in own if n in group] for own, group in zip((left, right), free, strict=True)
        ]
        out = [*batch, *ours[0], *ours[1]]
        pairs = [tuple(own.index(n) for n in summed) for own in (left, right)]
        after = ()
        if function == "tensordot":
            signed = [tuple(i - len(own) if rng.random() < 0.3 else i for i in pair)
                      for pair, own in zip(pairs, (left, right), strict=True)]  # fmt: skip
            after = (tuple(signed),)
        elif function == "dot_general":
            dims = [tuple(own.index(n) for n in batch) for own in (left, right)]
            after = ((tuple(pairs), tuple(dims)),)
        else:
            rng.shuffle(out)
    return (), after, left, right, out, [sizes[n] for n in left], [sizes[n] for n in right]


def draw(function: str, rng: np.random.Generator, *, valid: bool = False) -> Call:
    """A random call; without ``valid`` some of them are ones that jax refuses."""
    before, after, left, right, out, a, b = _core(function, rng)
    spoilt = not valid and rng.random() < 0.15
    if spoilt:
        a = [s + 1 if rng.random() < 0.4 else s for s in a]
    kinds = [str(rng.choice(FLOATS)) if rng.random() < 0.7 else str(rng.choice(OTHERS))
             for _ in range(2)]  # fmt: skip
    if function == "dot_general" or valid:  # lax promotes nothing and takes arrays only
        kinds = [kinds[0] if kinds[0] in FLOATS else "bfloat16"] * 2
    if not valid and not spoilt and rng.random() < 0.1:  # a scalar
        a, left = [], []
    specs = []
    for kind, shape in zip(kinds, (a, b), strict=True):
        python = kind.startswith("python")
        specs.append(Spec(kind.replace("python ", "weak ").replace("int", "int32")
                          .replace("float", "float32") if python and shape else kind,
                          tuple(int(s) for s in shape)))  # fmt: skip
    keywords: dict[str, Any] = {}
    if function not in ("matvec", "vecmat"):
        if rng.random() < 0.3:
            keywords["precision"] = rng.choice(["highest", "default", "tensorfloat32"])
        if rng.random() < 0.3:
            keywords["preferred_element_type"] = jnp.dtype(
                rng.choice(["float32", "bfloat16", *([] if valid else ["int32"])])
            )
    if function == "vecdot":
        keywords["axis"], left, right, specs = _move_axis(rng, left, right, specs)
    if function == "einsum":
        before = (_subscripts(rng, left, right, out, valid),)
    names = (tuple(left), tuple(right), tuple(out))
    return Call(function, tuple(specs), before, after, keywords, None if spoilt else names)


def _move_axis(rng: np.random.Generator, left: Any, right: Any, specs: Any) -> Any:
    """vecdot along an axis that both operands have at the same place from the end."""
    axis = -int(rng.integers(1, min(len(left), len(right), 3) + 1)) if left and right else -1
    moved, names = [], []
    for own, spec in zip((left, right), specs, strict=True):
        own, shape = list(own), list(spec.shape)
        if own:
            own.insert(len(own) + axis, own.pop())
            shape.insert(len(shape) + axis, shape.pop())
        names.append(own)
        moved.append(Spec(spec.kind, tuple(shape)))
    return axis, *names, moved


def _subscripts(rng: np.random.Generator, left: Any, right: Any, out: Any, valid: bool) -> str:
    letters = dict(zip(dict.fromkeys([*left, *right]), string.ascii_letters, strict=False))
    a, b, c = ("".join(letters.get(n, "z") for n in own) for own in (left, right, out))
    if not valid and rng.random() < 0.15:
        c += "Z"  # an index that no operand has
    return f"{a}, {b} -> {c}" if rng.random() < 0.3 else f"{a},{b}->{c}"


def canonical(x: np.ndarray, own: list[str], groups: Any, shape: tuple[int, ...]) -> np.ndarray:
    """``x`` with its dimensions in the order of the groups of names, each group merged to one."""
    order = [own.index(n) for group in groups for n in group]
    assert sorted(order) == list(range(x.ndim))
    return np.ascontiguousarray(x.transpose(order)).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Canonical:
    """A product as matrices: a [B, M, K], b [B, N, K], and how to read the result."""

    a: np.ndarray
    b: np.ndarray
    batch: Names
    rows: tuple[Names, Names]
    terms: int

    def of_result(self, y: Any, out: Names) -> np.ndarray:
        """The result as [B, M, N]."""
        y = np.asarray(y)
        order = [out.index(n) for n in (*self.batch, *self.rows[0], *self.rows[1])]
        return np.ascontiguousarray(y.transpose(order)).reshape(
            self.a.shape[0], self.a.shape[1], self.b.shape[1]
        )


def canonical_product(call: Call, operands: Any) -> Canonical:
    """The matrices of a call whose ``names`` are known."""
    assert call.names is not None
    left, right, out = (list(own) for own in call.names)
    arrays = [np.asarray(x) for x in operands]
    if call.function == "vdot":
        arrays = [x.reshape(-1) for x in arrays]
    sizes: dict[str, int] = {}
    for own, x in ((left, arrays[0]), (right, arrays[1])):
        for n, s in zip(own, x.shape, strict=True):
            sizes[n] = max(s, sizes.get(n, 1))
    squeezed = []
    for own, x in ((left, arrays[0]), (right, arrays[1])):
        drop = tuple(i for i, n in enumerate(own) if x.shape[i] == 1 and sizes[n] > 1)
        squeezed.append(([n for i, n in enumerate(own) if i not in drop], x.squeeze(drop)))
    (left, a), (right, b) = squeezed
    batch = tuple(n for n in out if n in left and n in right)
    summed = tuple(n for n in left if n in right and n not in batch)
    free = [tuple(n for n in own if n not in (*batch, *summed)) for own in (left, right)]
    count, terms, rows, cols = (
        math.prod(sizes[n] for n in group) for group in (batch, summed, *free)
    )
    return Canonical(
        canonical(a, left, (batch, free[0], summed), (count, rows, terms)),
        canonical(b, right, (batch, free[1], summed), (count, cols, terms)),
        batch,
        (free[0], free[1]),
        terms,
    )
