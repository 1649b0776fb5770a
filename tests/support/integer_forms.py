"""Integer operands for instruction tests, and Python's integers as their oracle."""

import itertools
from collections.abc import Callable

import numpy as np

from support.ptx_forms import evaluate

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
Oracle = Callable[..., int]


def bits_of(kind: str) -> int:
    return int(kind[1:])


def dtype_of(kind: str) -> type:
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits_of(kind)]


def read(kind: str, raw: int) -> int:
    """The number that bits stand for."""
    n = bits_of(kind)
    return raw - (1 << n) if kind[0] == "s" and raw >> (n - 1) else raw


def cut(kind: str, value: int) -> int:
    return value & ((1 << bits_of(kind)) - 1)


def clamp(kind: str, value: int) -> int:
    n = bits_of(kind)
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)
    return min(max(value, low), high)


def samples(kinds: list[str], seed: int = 0) -> list[np.ndarray]:
    """Edge values in every combination, then random ones of random length."""
    rng = np.random.default_rng(seed)
    edges = []
    for kind in kinds:
        n = bits_of(kind)
        edges.append([0, 1, (1 << n) - 1, 1 << (n - 1), (1 << (n - 1)) - 1, 5])
    rows = list(itertools.product(*edges))
    for _ in range(300):
        rows.append(
            tuple(
                int(rng.integers(0, 2**63)) * 2 % (1 << int(rng.integers(1, bits_of(k) + 1)))
                for k in kinds
            )
        )
    return [np.array([row[i] for row in rows], dtype_of(kind)) for i, kind in enumerate(kinds)]


def check(
    instruction: str, kinds: list[str], result: str, oracle: Oracle, version: str = "8.8"
) -> None:
    """The instruction equals oracle(*numbers) modulo the result's width."""
    inputs = samples(kinds)
    (got,) = evaluate(instruction, inputs, [bits_of(result)], version=version)
    want = [
        cut(result, oracle(*(read(k, int(x)) for k, x in zip(kinds, row, strict=True))))
        for row in zip(*inputs, strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(want, dtype_of(result)))
