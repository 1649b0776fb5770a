"""What timed calls returned, judged.

The check of a peer sees every timed call's result, and keeps whole rows and whole columns of it, at
random places that a peer cannot know. A row passes every column tile and a column every row tile,
so that no part of a result can be left out; each call has inputs of its own, so that the answer to
an earlier call is wrong.

The reference is float64 arithmetic by NumPy on the very operands, decoded by the tables of this
file. Two claims can be made about a result (`Claim`): that each element is within a derived bound,
where the operands were given in quantized form, or that it is off by as much as its format makes it
be, where the timed call itself quantizes. A result that is *more* exact than its format allows was
not quantized, and is as wrong as one that is off too far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

ROWS, COLUMNS = 2, 4  # of each result that are kept
_SEGMENT = 64  # elements over which relative errors are averaged
_CHUNK = 1024  # rows of B in float64 at a time

# Codes of E2M1 by value: OCP MX v1.0, table 5.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1)


def ue4m3(codes: np.ndarray) -> np.ndarray:
    """Values of scale bytes: four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(np.int32) - 7)
    return np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)


def nvfp4_values(packed: np.ndarray, scales: np.ndarray, tensor: float) -> np.ndarray:
    """float32 [R, K] of packed codes [R, K / 2] and scale bytes [R, K / 16], linear."""
    rows = packed.shape[0]
    blocks = _PAIRS[packed].reshape(rows, -1, 16) * ue4m3(scales)[..., None]
    return (blocks * np.float32(tensor)).reshape(rows, -1)


def bfloat16_values(x: Any) -> np.ndarray:
    """float32 of a bfloat16 array; NumPy's cast of the same takes ten times as long."""
    bits = np.asarray(x).view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32)


# ---- Claims --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a peer says of each of its results.

    Attributes:
        bound: if not None, the largest |error| of an element over the sum of |a b| of its terms.
        low: the relative error, as the median over segments of 64 elements, is at least this.
        high: and in no segment more than this.
    """

    bound: float | None = None
    low: float = 0.0
    high: float = np.inf


def exact_sum(k: int, out_bits: int) -> Claim:
    """A float32 sum of k given products, then rounded to ``out_bits`` of significand.

    Each of the k additions is off by 2^-24 of the sum of magnitudes at most, and a decoded operand
    product may be rounded once.
    """
    return Claim(bound=(k + 2) * 2.0**-24 + (2.0**-out_bits if out_bits < 24 else 0.0))


# Of standard normal values a format loses: NVFP4 9.5 %, MXFP4 11.4 %, MXFP8 2.6 %, bfloat16 0.17 %
# (root mean square over root mean square, computed in NumPy); a product of two such operands
# sqrt(2) times as much, with stochastic rounding up to twice. What is wrong is off by 100 % (zeros)
# or 141 % (another input set's answer).
PRODUCT_OF = {
    "nvfp4": Claim(low=0.06, high=0.6),
    "mxfp4": Claim(low=0.06, high=0.7),
    "mxfp8": Claim(low=0.012, high=0.15),
    "bfloat16": Claim(high=0.03),
    "float32": Claim(high=1e-3),
}


def _segments(x: np.ndarray) -> np.ndarray:
    """Sums over at most 64 neighbours along the last axis; a remainder joins the one before."""
    if x.shape[-1] < 2 * _SEGMENT:
        return x.sum(-1, keepdims=True)
    return np.add.reduceat(x, np.arange(0, x.shape[-1] - _SEGMENT + 1, _SEGMENT), axis=-1)


def judge(
    claim: Claim, got: np.ndarray, exact: np.ndarray, magnitude: np.ndarray | None
) -> tuple[str, float]:
    """One line on how ``got`` [R, N] breaks the claim ("" if it does not), and its error."""
    if got.shape != exact.shape:
        return f"shape {got.shape} instead of {exact.shape}", np.inf
    error = np.abs(got.astype(np.float64) - exact)
    if claim.bound is not None:
        assert magnitude is not None
        worst = float(np.max(error / magnitude))
        # Written so that NaN is an error.
        return ("" if worst <= claim.bound else f"off by {worst:.1e} of the terms"), worst
    squares = _segments(exact**2)
    relative = np.sqrt(_segments(error**2) / np.maximum(squares, 1e-30))
    worst, middle = float(np.max(relative)), float(np.median(relative))
    if not worst <= claim.high:
        return f"off by {worst:.0%}", worst
    if middle < claim.low:
        return f"off by {middle:.1%} only: more exact than the format, so not quantized", middle
    return "", middle


# ---- Products ------------------------------------------------------------------------------------


class Rows:
    """A matrix [rows, K] of which some rows at a time are decoded to float32."""

    def __init__(self, shape: tuple[int, int], decode: Callable[[Any], np.ndarray]) -> None:
        """Args: shape: of the matrix; decode: index of rows (slice, array) -> float32 [., K]."""
        self.shape, self.decode = shape, decode


def dense(x: np.ndarray) -> Rows:
    """A matrix that is there."""
    return Rows(x.shape, lambda index: x[index])


def bfloat16(x: Any) -> Rows:
    """One that is there as bfloat16."""
    array = np.asarray(x)
    return Rows(array.shape, lambda index: bfloat16_values(array[index]))


def nvfp4(q: Any) -> Rows:
    """A `BlockScaledArray` in NVFP4 with linear scales."""
    packed, scales, tensor = np.asarray(q.values), np.asarray(q.scales), float(q.global_scale)
    shape = (packed.shape[0], 2 * packed.shape[1])
    return Rows(shape, lambda index: nvfp4_values(packed[index], scales[index], tensor))


@dataclasses.dataclass
class Parts:
    """Rows [R, N] and columns, as rows [C, M], of one exact result, with sums of magnitudes."""

    rows: np.ndarray
    columns: np.ndarray
    row_values: np.ndarray
    column_values: np.ndarray
    row_magnitudes: np.ndarray
    column_magnitudes: np.ndarray


class Oracle:
    """Exact results A B^T for every input set, at the places that are looked at.

    The peers of a case share it: all are looked at in the same places.
    """

    def __init__(
        self, shape: tuple[int, int], operands: Callable[[int], tuple[np.ndarray, Rows]]
    ) -> None:
        """Args: shape: of the results; operands: input set -> A float32 [M, K], B [N, K]."""
        self.shape, self._operands = shape, operands
        self._random = np.random.default_rng()  # from the operating system: nobody knows where
        self._places: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._parts: dict[int, Parts] = {}

    def places(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows, columns) of result ``index`` that are looked at."""
        if index not in self._places:
            m, n = self.shape
            self._places[index] = (
                self._random.integers(m, size=min(ROWS, m)),
                self._random.integers(n, size=min(COLUMNS, n)),
            )
        return self._places[index]

    def parts(self, indices: Iterable[int]) -> dict[int, Parts]:
        """The exact results on these input sets."""
        wanted = [index for index in indices if index not in self._parts]
        by_weight: dict[int, tuple[Rows, dict[int, np.ndarray]]] = {}
        for index in wanted:
            a, b = self._operands(index)
            rows, columns = self.places(index)
            picked = b.decode(columns).astype(np.float64)
            n = self.shape[1]
            self._parts[index] = Parts(
                rows, columns, np.empty((len(rows), n)), picked @ a.T.astype(np.float64),
                np.empty((len(rows), n)), np.abs(picked) @ np.abs(a.T).astype(np.float64),
            )  # fmt: skip
            by_weight.setdefault(id(b), (b, {}))[1][index] = a[rows].astype(np.float64)
        for b, lines in by_weight.values():  # each weight is decoded once for all input sets
            stacked = np.concatenate(list(lines.values()))
            for begin in range(0, b.shape[0], _CHUNK):
                chunk = slice(begin, begin + _CHUNK)
                decoded = b.decode(chunk).T.astype(np.float64)
                values, magnitudes = stacked @ decoded, np.abs(stacked) @ np.abs(decoded)
                done = 0
                for index, line in lines.items():
                    part, here = self._parts[index], slice(done, done + len(line))
                    part.row_values[:, chunk] = values[here]
                    part.row_magnitudes[:, chunk] = magnitudes[here]
                    done += len(line)
        return {index: self._parts[index] for index in indices}


class ProductCheck:
    """Judges results, or tuples of them, by one oracle for each."""

    def __init__(
        self,
        oracles: Sequence[Oracle],
        claim: Claim,
        unpack: Callable[[Any], Sequence[Any]] = lambda result: [result],
    ) -> None:
        """Args: oracles: of each output; claim: about all; unpack: result -> its outputs [M, N]."""
        self._oracles, self._claim, self._unpack = oracles, claim, unpack
        self._kept: dict[int, list[tuple[np.ndarray, np.ndarray] | str]] = {}

    def take(self, index: int, result: Any) -> None:
        """Copies the rows and columns that are looked at."""
        kept: list[tuple[np.ndarray, np.ndarray] | str] = []
        for oracle, output in zip(self._oracles, self._unpack(result), strict=True):
            array = np.asarray(output)
            if array.shape != oracle.shape:
                kept.append(f"shape {array.shape} instead of {oracle.shape}")
                continue
            rows, columns = oracle.places(index)
            part = (array[rows], array[:, columns].T)
            kept.append((part[0].astype(np.float64), part[1].astype(np.float64)))
        self._kept[index] = kept

    def verdict(self) -> tuple[bool, str]:
        """Whether every kept result is as claimed; the largest error, or what is wrong."""
        worst = 0.0
        exact = [oracle.parts(self._kept) for oracle in self._oracles]
        for index, outputs in self._kept.items():
            for number, (got, oracle) in enumerate(zip(outputs, exact, strict=True)):
                if isinstance(got, str):
                    return False, f"WRONG: {got}"
                parts = oracle[index]
                for values, reference, magnitude in (
                    (got[0], parts.row_values, parts.row_magnitudes),
                    (got[1], parts.column_values, parts.column_magnitudes),
                ):
                    if self._claim.bound is None and reference.shape[1] < 16:
                        continue  # a column of so few elements has no typical error
                    problem, error = judge(self._claim, values, reference, magnitude)
                    if problem:
                        output = f" of output {number}" if len(outputs) > 1 else ""
                        return False, f"WRONG: {problem}{output}, input set {index}"
                    worst = max(worst, error)
        return True, f"ok {worst:.1e} in {len(self._kept)} results"


# ---- Quantized matrices --------------------------------------------------------------------------


class QuantizeCheck:
    """Judges codes, by rows of the decoded matrix."""

    def __init__(
        self,
        matrix: Callable[[int], np.ndarray],
        decode: Callable[[Any, np.ndarray], Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]],
        least_bytes: int,
        high: float,
    ) -> None:
        """Keeps the parts.

        Args:
            matrix: input set -> float32 [R, K].
            decode: (result, rows) -> for each copy: (its rows float32, the matrix's rows in it as
                indices, the largest error that each element may have, or an empty array). For a
                copy along the other axis, rows are columns of the matrix.
            least_bytes: that a result has; fewer cannot hold it.
            high: relative error in any segment, at most.
        """
        self._matrix, self._decode, self._least, self._high = matrix, decode, least_bytes, high
        self._random = np.random.default_rng()
        self._kept: dict[int, Any] = {}
        self._problem = ""

    def take(self, index: int, result: Any) -> None:
        """Decodes some rows."""
        import jax

        size = sum(leaf.nbytes for leaf in jax.tree.leaves(result))
        if size < self._least:
            self._problem = f"WRONG: {size} bytes, at least {self._least} expected"
        rows = self._random.integers(min(self._matrix(index).shape), size=48)
        self._kept[index] = [
            tuple(np.array(part) for part in copy) for copy in self._decode(result, rows)
        ]

    def verdict(self) -> tuple[bool, str]:
        """Whether every kept row is as close as the format allows, and no closer."""
        if self._problem:
            return False, self._problem
        worst = 0.0
        claim = Claim(low=0.06, high=self._high)
        for index, copies in self._kept.items():
            x = self._matrix(index)
            for number, (values, rows, limit) in enumerate(copies):
                exact = (x if number == 0 else x.T)[rows]
                problem, error = judge(claim, values, exact.astype(np.float64), None)
                if not problem and limit.size and not np.all(np.abs(values - exact) <= limit):
                    problem = "an element is off by more than half a step"
                if problem:
                    return False, f"WRONG: {problem}, input set {index}"
                worst = max(worst, error)
        return True, f"ok {worst:.3f} in {len(self._kept)} results"
