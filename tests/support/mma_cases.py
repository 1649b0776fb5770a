"""Operands for tests of matrix products: random ones, and ones that reach the rules' edges."""

import numpy as np

from oracles import mma_plain, tables

STYLES = 6


def _codes(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], low: int, high: int
) -> np.ndarray:
    """Codes with exponent fields low..high (of finite ones), random sign and mantissa."""
    exponent_bits, mantissa_bits = mma_plain.FORMATS[kind]
    top = (1 << exponent_bits) - (1 if kind in ("e2m3", "e3m2", "e2m1") else 2)
    field = rng.integers(max(low, 0), min(high, top) + 1, shape)
    sign = rng.integers(0, 2, shape) << (exponent_bits + mantissa_bits)
    return sign | field << mantissa_bits | rng.integers(0, 1 << mantissa_bits, shape)


def operand(rng: np.random.Generator, kind: str, shape: tuple[int, int, int]) -> np.ndarray:
    """Codes [W, rows, K]; warp w has style w % 6.

    0 and 3 exponents around 1 (3: see `cancel`); 1 all exponents; 2 subnormals and zeros; 4 mostly
    zeros; 5 all codes in row 0, so that its outputs meet NaN and infinity.
    """
    exponent_bits, mantissa_bits = mma_plain.FORMATS[kind]
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    out = np.zeros(shape, np.int64)
    for w in range(shape[0]):
        style, rows = w % STYLES, shape[1:]
        if style in (0, 3, 5):
            spread = 1 + w // STYLES % 4
            out[w] = _codes(rng, kind, rows, bias - spread, bias + spread)
        elif style == 1:
            out[w] = _codes(rng, kind, rows, 0, top)
        elif style == 2:
            out[w] = _codes(rng, kind, rows, 0, 1) * (rng.random(rows) < 0.7)
        else:
            out[w] = _codes(rng, kind, rows, 0, top) * (rng.random(rows) < 0.1)
        if style == 5:
            out[w, 0] = rng.integers(0, 1 << (1 + exponent_bits + mantissa_bits), shape[2])
    return out


def cancel(rng: np.random.Generator, kind: str, a: np.ndarray, b: np.ndarray) -> None:
    """Makes style 3 cancel: a[k + K/2] = -a[k], b[k + K/2] = b[k], but for a few bits."""
    half = a.shape[2] // 2
    sign = 1 << sum(mma_plain.FORMATS[kind])
    for w in range(3, len(a), STYLES):
        a[w, :, half:] = a[w, :, :half] ^ sign
        b[w, :, half:] = b[w, :, :half]
        a[w, rng.integers(0, a.shape[1], 8), rng.integers(0, a.shape[2], 8)] ^= 1


def meet_specials(kind: str, a: np.ndarray, b: np.ndarray) -> None:
    """Puts infinities of A, if it has any, before numbers and, in column 1 of B, before a zero."""
    exponent_bits, mantissa_bits = mma_plain.FORMATS[kind]
    inf = ((1 << exponent_bits) - 1) << mantissa_bits
    if not mma_plain.take_apart(kind, np.array(inf))[2]:
        return
    a[5::STYLES, 2, 0] = inf
    a[5::STYLES, 3, 0] = inf | 1 << (exponent_bits + mantissa_bits)
    b[5::STYLES, 1, 0] = 0


def accumulators(rng: np.random.Generator, result: str, warps: int) -> np.ndarray:
    """Bits [W, 16, 8]: around 1, of all exponents, zeros, and a few specials."""
    exponent_bits, mantissa_bits = mma_plain.FORMATS[result]
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    out = np.zeros((warps, 16, 8), np.int64)
    for w in range(warps):
        choice = w // STYLES % 4
        if choice < 2:
            out[w] = _codes(rng, result, (16, 8), bias - 12, bias + 12)
        elif choice == 2:
            out[w] = _codes(rng, result, (16, 8), 0, top)
        if w % STYLES == 5:
            sign = 1 << (exponent_bits + mantissa_bits)
            inf = top << mantissa_bits
            out[w, 1, :5] = inf, inf | sign, inf + 1, 0, sign
    return out.astype(np.uint32)


def scale_bytes(rng: np.random.Generator, scale: str, shape: tuple[int, int, int]) -> np.ndarray:
    """Bytes [W, rows, n]: near 1; every third warp has any scale, and NaN in one row."""
    out = np.zeros(shape, np.int64)
    for w in range(shape[0]):
        if scale == "ue8m0":
            low, high = (0, 255) if w % 3 == 2 else (115, 140)
            out[w] = rng.integers(low, high, shape[1:])
        else:
            out[w] = rng.integers(0, 0x7F, shape[1:])
        if w % 3 == 2:
            out[w, 3] = rng.integers(0, 256, shape[2])
    return out.astype(np.uint8)


def container(kind: str, codes: np.ndarray) -> np.ndarray:
    """Codes in their 8-bit containers of kinds f8f6f4 and mxf8f6f4: FP4 in bits 5:2."""
    return codes << 2 if tables.KINDS[kind].bits == 4 else codes
