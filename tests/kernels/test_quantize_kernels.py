"""The quantize kernels on the PTX machine give the CPU backend's bytes, padding included.

`make test` runs a sample; `make test-kernels` (mark `kernels`) runs every variant on every chip
with every size.
"""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support import cpu_quantize as cpu
from support import device_kernels as device
from support.cpu_quantize import Options, Placement, Result
from support.device_kernels import Device

F32, BF16, F16 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16)
SIZES = (1, 15, 16, 17, 31, 33, 127, 128, 129, 257)
FORMATS = list(cpu.FORMATS)
WHOLE = Placement()  # x is the logical tensor
SEED = 0x0123_4567_89AB_CDEF
# What a copy can be asked for besides its format; each in turn for the pairs of all others.
CHOICES: dict[str, tuple[dict[str, object], ...]] = {
    "rounding": ({}, {"stochastic": True, "seed": SEED, "stream": 5}, {"four_over_six": True}),
    "transform": ({}, {"hadamard": True}, {"hadamard": True, "signs": 0x2B67}, {"tiles": True}),
    "layout": ({}, {"tiled_layout": True}),
    "rule": ({}, {"rule": "floor"}),
    "copies": ({"axis": 1}, {"axis": 0}, {"both": True}),
    "input": ({"input": F32}, {"input": BF16}, {"input": F16}),
    "format": tuple({"format": name} for name in FORMATS),
}


def pairwise(choices: dict[str, tuple[dict[str, object], ...]]) -> list[dict[str, object]]:
    """Rows in which every pair of alternatives of two choices occurs, built greedily."""
    names = list(choices)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(choices[names[a]]))
        for j in range(len(choices[names[b]]))
    }

    def key(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
        return (a, i, b, j) if a < b else (b, j, a, i)

    rows = []
    while missing:
        a, i, b, j = min(missing)
        row: dict[int, int] = {a: i, b: j}
        for c in range(len(names)):
            if c in row:
                continue
            gains = [
                sum(key(c, k, d, row[d]) in missing for d in row)
                for k in range(len(choices[names[c]]))
            ]
            row[c] = gains.index(max(gains))
        missing -= {(d, row[d], e, row[e]) for d, e in itertools.combinations(sorted(row), 2)}
        rows.append({k: v for c, i in row.items() for k, v in choices[names[c]][i].items()})
    return rows


def legal(row: dict[str, object]) -> dict[str, object]:
    """Drops what does not go with the format (the handlers refuse it)."""
    row = dict(row)
    if row.get("four_over_six") and row["format"] != "NVFP4":
        del row["four_over_six"]
    return row


ROWS = [legal(row) for row in pairwise(CHOICES)]


def values(shape: tuple[int, ...], dtype: np.dtype, seed: int, *, bad: bool) -> np.ndarray:
    """Tricky values, signed zeros and subnormals among them; with `bad` also NaN and infinities."""
    rng = np.random.default_rng(seed)
    x = cpu.tricky_values(rng, shape, dtype)
    if bad:
        flat = x.reshape(-1)
        nan, inf = {F32: (np.nan, np.inf), BF16: (0x7FC1, 0xFF80), F16: (np.nan, -np.inf)}[dtype]
        for value in (nan, inf):
            flat[rng.integers(0, flat.size, 1 + flat.size // 999)] = value
    return x


def compare(
    got: list[Result], x: np.ndarray, copies: list[Options], placement: Placement = WHOLE
) -> None:
    """Every byte of values, scales and tensor scales."""
    for g, w, o in zip(got, cpu.quantize(x, *copies, placement=placement), copies, strict=True):
        for name in ("values", "scales", "global_scale"):
            a, b = (np.ascontiguousarray(getattr(r, name)).view(np.uint8) for r in (g, w))
            wrong = np.argwhere(a != b)
            assert not len(wrong), f"{o}: {name} differ at {wrong[:4].tolist()} of {a.shape}"


def run_row(row: dict[str, object], shape: tuple[int, int], chip: str, seed: int = 0) -> None:
    """Makes the copies of one row of options on a chip and compares them."""
    row = dict(row)
    dtype = row.pop("input")
    both = row.pop("both", False)
    o = Options(**{"axis": 1, **row})  # type: ignore[arg-type]
    copies = [o, replace(o, axis=0, stream=o.stream + 1)] if both else [o]
    assert isinstance(dtype, np.dtype)
    x = values((1, *shape), dtype, seed, bad=seed % 2 == 1)
    compare(device.quantize(Device(chip, seed), x, *copies), x, copies)


def describe(row: dict[str, object]) -> str:
    """A test's name."""
    return "-".join(
        k if v is True else str(v) for k, v in row.items() if k not in ("seed", "stream")
    )


@pytest.fixture(autouse=True)
def _tools() -> None:
    device.require_tools()


# ---- The sample of `make test` ------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, len(ROWS), 3))
def test_sample_of_options_equals_the_cpu(number: int) -> None:
    """Every third row of options, each at other sizes around tile edges and on another chip."""
    shape = SIZES[number % 10], SIZES[(7 * number + 3) % 10]
    chip = ("100a", "120a", "80")[number // 3 % 3]
    run_row(ROWS[number], shape, chip, seed=number)


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "golden.npz"
VARIANTS = {
    "nvfp4_row": Options("NVFP4", 1),
    "nvfp4_col": Options("NVFP4", 0),
    "nvfp4_row2d": Options("NVFP4", 1, tiles=True),
    "nvfp4_col2d": Options("NVFP4", 0, tiles=True),
    "nvfp4_row_sr": Options("NVFP4", 1, stochastic=True),
    "nvfp4_col_rht": Options("NVFP4", 0, hadamard=True),
} | {
    f"mx_{element}_{rule}": Options(name, rule=rule)
    for element, name in {
        "e2m1": "MXFP4",
        "e2m3": "MXFP6_E2M3",
        "e3m2": "MXFP6_E3M2",
        "e4m3": "MXFP8_E4M3",
        "e5m2": "MXFP8_E5M2",
    }.items()
    for rule in ("rceil", "floor")
}


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as archive:
        return dict(archive)


def unpacked(result: Result, o: Options) -> np.ndarray:
    """Codes as the golden file stores them: 4-bit ones packed, others one a byte."""
    rows = result.values[0]
    if o.bits != 6:
        return rows
    word = rows.reshape(len(rows), -1, 3).astype(np.uint32) @ np.array(
        [1, 1 << 8, 1 << 16], np.uint32
    )
    return (
        (word[..., None] >> np.arange(0, 24, 6, dtype=np.uint32) & 0x3F)
        .astype(np.uint8)
        .reshape(len(rows), -1)
    )


def golden_names(variant: str) -> list[str]:
    """The keys `distribution/dtype/variant` of a variant, sorted."""
    names = (name.removesuffix("/codes") for name in golden())
    return sorted(name for name in names if name.endswith(f"/{variant}"))


def check_golden(name: str, chip: str) -> None:
    """The published codes and scales; amax is taken from the golden file too."""
    o = VARIANTS[name.rsplit("/", 1)[1]]
    x = golden()[name.rsplit("/", 1)[0] + "/x"][None]
    if o.stochastic:
        o = replace(o, seed=int(golden()[f"{name}/seed"]), stream=int(golden()[f"{name}/stream"]))
    amax = golden().get(f"{name}/amax", np.float32(0))
    (got,) = device.quantize(
        Device(chip), x, o, amax=[np.array([amax], np.float32).view(np.uint32)]
    )
    np.testing.assert_array_equal(unpacked(got, o), golden()[f"{name}/codes"])
    scales = golden()[f"{name}/scales"]
    np.testing.assert_array_equal(got.scales.reshape(scales.shape), scales)


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_bytes(variant: str) -> None:
    """One tensor of each input type."""
    names = golden_names(variant)
    for dtype in ("f32", "bf16"):
        for name in [n for n in names if f"/{dtype}/" in n][:1]:
            check_golden(name, "100a")


def test_a_shard_gives_the_bytes_of_its_part() -> None:
    """Origin words and logical sizes decide the random bits, not the place in memory."""
    x = values((2, 96, 160), BF16, 3, bad=False)
    copies = [
        Options(stochastic=True, seed=SEED),
        Options(axis=0, stochastic=True, seed=SEED, stream=1),
    ]
    amax, _, _ = cpu.amax(x)
    copies = [o.with_amax(amax) for o in copies]
    placement = Placement(0, 32, 64, 96, 160)
    part = np.ascontiguousarray(x[:, 32:, 64:128])
    got = device.quantize(Device(), part, *copies, placement=placement)
    compare(got, part, copies, placement)
    whole = cpu.quantize(x, *copies)
    np.testing.assert_array_equal(got[0].values, whole[0].values[:, 32:, 32:64])
    np.testing.assert_array_equal(got[1].values, whole[1].values[:, 64:128, 16:48])


def test_examples_have_their_own_amax_seed_and_block_numbers() -> None:
    """x[V, L, R, C]: an example equals a call of its own; more tiles than CTAs in y."""
    x = values((3, 2, 200, 40), F32, 5, bad=False)
    seeds = np.arange(6, dtype=np.uint32).reshape(3, 2) * 77
    o = Options(axis=0, stochastic=True, stream=9)
    (got,) = device.quantize(Device(), x, o, seeds=[seeds], max_y=1)
    for v in range(3):
        seed = int(seeds[v, 1]) << 32 | int(seeds[v, 0])
        (want,) = cpu.quantize(x[v], replace(o, seed=seed))
        part = Result(
            *(getattr(got, n)[2 * v : 2 * v + 2] for n in ("values", "scales", "global_scale"))
        )
        assert part.equals(want)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty_tensors_have_a_tensor_scale(shape: tuple[int, int]) -> None:
    """No codes, no scales, and the global scale is still written."""
    x = np.zeros((2, *shape), np.float32)
    bits = np.array([3.0, 0.0], np.float32).view(np.uint32)
    o = Options().with_amax(bits)
    (got,) = device.quantize(Device(), x, o)
    np.testing.assert_array_equal(got.global_scale, [np.float32(3) / np.float32(2688), 0])


# ---- The full run -------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("chip", device.CHIPS)
@pytest.mark.parametrize("row", ROWS, ids=describe)
def test_all_options_at_all_sizes(row: dict[str, object], chip: str) -> None:
    """Each row of options at ten shapes in which every size occurs for rows and for columns."""
    for i, rows in enumerate(SIZES):
        run_row(row, (rows, SIZES[(3 * i + 1) % 10]), chip, seed=i)


@pytest.mark.kernels
@pytest.mark.parametrize("chip", device.CHIPS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_golden_bytes(variant: str, chip: str) -> None:
    """Every tensor of the file."""
    for name in golden_names(variant):
        check_golden(name, chip)


@pytest.mark.kernels
@pytest.mark.parametrize("chip", device.CHIPS)
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("name", ["NVFP4", "four over six", "MXFP4", "MXFP6_E3M2", "MXFP8_E5M2"])
def test_twenty_schedules_of_several_tiles(name: str, bits: int, chip: str) -> None:
    """The order in which warps and CTAs run changes no byte."""
    o = Options(name) if name != "four over six" else Options(four_over_six=True)
    copies = [o, replace(o, axis=0)]
    x = values((1, 150, 140), BF16 if bits == 16 else F32, 1, bad=True)
    for seed in range(20):
        compare(device.quantize(Device(chip, seed), x, *copies), x, copies)
