"""csrc/plan: every legal problem has a plan, and the plan is one that its kernel can run."""

import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import jax_fp4 as fp4
from jax_fp4 import _native
from jax_fp4.cli import main
from support import device_kernels

TILES = {"128x32": (128, 32), "128x64": (128, 64), "128x128": (128, 128), "256x128": (256, 128),
         "256x256": (256, 256)}  # fmt: skip
SIZES = st.one_of(st.integers(0, 700), st.sampled_from([1024, 4096, 5120, 14336, 128256, 1 << 20]))
MX = [f for f in fp4.FORMATS if f.block == 32]


def attribute(format: fp4.Format, layout: str = "tiled") -> str:
    return f"{format.attribute()} layout={layout}"


def plan(
    shape: tuple[int, int, int, int],
    formats: tuple[fp4.Format, fp4.Format] = (fp4.NVFP4, fp4.NVFP4),
    layout: str = "tiled",
    batched: tuple[bool, bool] = (True, True),
    out: str = "bfloat16",
    chip: int = 100,
    multiprocessors: int = 148,
    grouping: str = "",
) -> dict[str, object]:
    a, b = (attribute(f, layout) for f in formats)
    return _native.plan_gemm(a, b, shape, batched, out, chip, multiprocessors, grouping)


@given(
    batch=st.integers(1, 5),
    m=SIZES,
    n=SIZES,
    k=SIZES,
    formats=st.one_of(
        st.just((fp4.NVFP4, fp4.NVFP4)), st.tuples(st.sampled_from(MX), st.sampled_from(MX))
    ),
    layout=st.sampled_from(["tiled", "linear"]),
    out=st.sampled_from(["float32", "bfloat16", "float16"]),
    chip=st.sampled_from([80, 86, 90, 100, 103, 110, 120, 121]),
    multiprocessors=st.sampled_from([1, 2, 16, 132, 148, 160]),
)
@example(1, 1, 1, 1 << 20, (fp4.NVFP4, fp4.NVFP4), "tiled", "float32", 100, 148)
@example(5, 1 << 20, 1 << 20, 1, (fp4.NVFP4, fp4.NVFP4), "tiled", "float32", 100, 148)
def test_every_problem_has_a_plan_that_covers_it(
    batch: int,
    m: int,
    n: int,
    k: int,
    formats: tuple[fp4.Format, fp4.Format],
    layout: str,
    out: str,
    chip: int,
    multiprocessors: int,
) -> None:
    """Splits cover K, none is empty; the workspace is at most what is lowered; it exists."""
    shape = (batch, m, n, k)
    chosen = plan(shape, formats, layout, (True, True), out, chip, multiprocessors)
    limit = _native.gemm_workspace(
        *(attribute(f, layout) for f in formats), shape, (True, True), out
    )
    assert 0 <= chosen["workspace_bytes"] <= limit
    if m * n == 0 or k == 0:
        assert chosen["kernel"] == ""
        return
    assert chosen["kernel"] in {kernel.name for kernel in device_kernels.compiler().kernels()}
    _, code, kind, tile = str(chosen["kernel"]).split("_")
    assert code == {10: "sm100", 12: "sm120"}.get(chip // 10, "bf16")
    four_bit = all(f.bits == 4 for f in formats)
    expected = "nvfp4" if formats[0].block == 16 else "mxfp4" if four_bit else "mxf8f6f4"
    assert kind == expected
    splits, split_k = int(chosen["splits"]), int(chosen["split_k"])
    assert (splits - 1) * split_k < k <= splits * split_k
    assert split_k % (128 if kind == "mxf8f6f4" else 256) == 0
    # Tiles of 32 columns have their scales at odd columns of tensor memory, but for the first one.
    columns = m if chosen["exchanged"] else n
    assert TILES[tile][1] >= 64 or columns <= 32


@given(
    groups=st.integers(0, 300),
    rows=st.integers(0, 400).map(lambda tiles: 128 * tiles),
    n=SIZES,
    k=SIZES,
    formats=st.one_of(
        st.just((fp4.NVFP4, fp4.NVFP4)), st.tuples(st.sampled_from(MX), st.sampled_from(MX))
    ),
    layout=st.sampled_from(["tiled", "linear"]),
    grouping=st.sampled_from(["rows", "k"]),
    chip=st.sampled_from([80, 90, 100, 103, 120]),
)
@example(128, 1 << 20, 14336, 5120, (fp4.NVFP4, fp4.NVFP4), "tiled", "rows", 100)
@example(128, 1 << 20, 14336, 5120, (fp4.NVFP4, fp4.NVFP4), "tiled", "k", 100)
def test_every_product_of_groups_has_a_plan(
    groups: int,
    rows: int,
    n: int,
    k: int,
    formats: tuple[fp4.Format, fp4.Format],
    layout: str,
    grouping: str,
    chip: int,
) -> None:
    """From static sizes alone: K is not split, and groups of rows have tiles of 128 rows of A."""
    assume(groups * max(rows * n, rows * k, n * k) <= 1 << 48)  # what a plan takes
    by_rows = grouping == "rows"
    shape = (groups, rows, n, k) if by_rows else (groups, n, k, rows)
    assume(groups * -(-shape[1] // 128) * -(-shape[2] // 64) < 1 << 31)  # what a grid holds
    options = (formats, layout, (False, by_rows), "float32", chip, 148, grouping)
    chosen = plan(shape, *options)
    limit = _native.gemm_workspace(
        *(attribute(f, layout) for f in formats), shape, (False, by_rows), "float32", grouping
    )
    assert 0 <= chosen["workspace_bytes"] <= limit
    if 0 in shape:
        assert chosen["kernel"] == ""
        return
    assert chosen["splits"] == 1
    tile_m, tile_n = TILES[str(chosen["kernel"]).split("_")[3]]
    if by_rows:
        assert tile_m == 128 and not chosen["exchanged"]
    columns = shape[1] if chosen["exchanged"] else shape[2]
    assert tile_n >= 64 or columns <= 32


def test_the_workspace_of_groups_does_not_grow_with_their_number() -> None:
    """Padded rows and tiled scales only: those of A once, not once a group."""
    sizes = [
        _native.gemm_workspace(
            *(attribute(f, "linear") for f in (fp4.MXFP4, fp4.MXFP8_E4M3)),
            (groups, 1024, 256, 320),
            (False, False),
            "float32",
            "k",
        )
        for groups in (1, 64)
    ]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize(
    ("shape", "kernel", "exchanged", "splits"),
    [
        ((1, 4096, 4096, 4096), "256x256", False, 1),
        ((1, 1, 4096, 1024), "128x32", True, 1),
        ((1, 16, 128256, 4096), "128x32", True, 1),
        ((1, 4096, 32, 1024), "128x32", False, 1),
        ((8, 128, 128, 128), "128x64", False, 1),
    ],
)
def test_choices_for_known_shapes(
    shape: tuple[int, int, int, int], kernel: str, exchanged: bool, splits: int
) -> None:
    """Large products go to pairs, few rows to the narrow tile with exchanged operands."""
    chosen = plan(shape)
    assert chosen["kernel"] == f"gemm_sm100_nvfp4_{kernel}"
    assert (chosen["exchanged"], chosen["splits"]) == (exchanged, splits)


def test_every_product_kernel_is_the_choice_for_some_problem() -> None:
    """No variant is compiled that no plan uses; one of gemm_sm100 is that of groups of rows."""
    sizes = [1, 16, 48, 64, 128, 200, 512, 1024, 4096, 8192]
    pairs = [(fp4.NVFP4, fp4.NVFP4), (fp4.MXFP4, fp4.MXFP4), (fp4.MXFP8_E4M3, fp4.MXFP4)]
    chosen = {
        plan((1, m, n, k), pair, chip=chip)["kernel"]
        for pair in pairs
        for chip in (90, 100, 120)
        for m in sizes
        for n in sizes
        for k in (128, 1024, 16384)
    }
    names = {kernel.name for kernel in device_kernels.compiler().kernels()}
    grouped = {
        plan((8, 8192, 4096, 4096), pair, batched=(False, True), grouping="rows")["kernel"]
        for pair in pairs
    }
    assert grouped == {f"gemm_sm100_{kind}_128x128" for kind in ("nvfp4", "mxfp4", "mxf8f6f4")}
    products = {name for name in names if name.startswith("gemm_") and name != "gemm_reduce"}
    assert chosen == products - grouped


def test_few_tiles_and_a_long_sum_are_split() -> None:
    """A weight gradient of a small layer: more CTAs than tiles; and never where tiles are many."""
    assert int(plan((1, 128, 256, 65536))["splits"]) > 1
    assert plan((1, 8192, 8192, 65536))["splits"] == 1


def test_a_plan_depends_on_its_arguments_only() -> None:
    """Twice the same: a program that runs again gives the same bits."""
    assert plan((3, 100, 200, 5000)) == plan((3, 100, 200, 5000))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"shape": (1, 1 << 31, 1, 1)}, "below 2\\^31"),
        ({"shape": (1, -1, 1, 1)}, "below 2\\^31"),
        ({"shape": (1 << 30, 1 << 20, 1 << 20, 64)}, "more than 2\\^48 elements"),
        ({"shape": ((1 << 31) - 1, 300, 128, 8), "multiprocessors": 1}, "more tiles than a grid"),
        ({"shape": (2, 100, 8, 128), "grouping": "rows"}, "whole tiles of 128"),
        ({"shape": (2, 128, 8, 100), "grouping": "k"}, "whole tiles of 128"),
        ({"shape": (1, 8, 8, 8), "chip": 75}, "no kernel for compute capability 7.5"),
        ({"shape": (1, 8, 8, 8), "formats": (fp4.NVFP4, fp4.MXFP4)}, "different sizes"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments: dict[str, object], said: str) -> None:
    """Sizes, chips and pairs of formats: a ValueError before anything is launched."""
    with pytest.raises(ValueError, match=said):
        plan(**arguments)  # pyright: ignore


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """In words and as JSON; a wrong format ends with 2."""
    assert main(["plan", "4096", "4096", "4096"]) == 0
    text = capsys.readouterr().out
    assert "kernel: gemm_sm100_nvfp4_256x256" in text and "(modelled)" in text
    assert main(["plan", "16", "4096", "4096", "--format", "mxfp8_e4m3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exchanged"] is True
    assert main(["plan", "512", "64", "64", "--batch", "3", "--groups", "rows"]) == 0
    text = capsys.readouterr().out
    assert (
        "groups 3, M 512" in text and "groups: 3 of rows, their sizes known to the device" in text
    )
    assert main(["plan", "64", "64", "512", "--batch", "3", "--groups", "k"]) == 0
    assert "3 in all" in capsys.readouterr().out
    assert main(["plan", "16", "16", "16", "--groups", "rows"]) == 2
    assert main(["plan", "128", "16", "16", "--groups", "rows", "--shared", "a"]) == 2
    assert "whole tiles of 128" in capsys.readouterr().err
    assert main(["plan", "16", "16", "16", "--format", "fp5"]) == 2
    assert main(["plan", "16", "16", "16", "--format-b", "mxfp4"]) == 2
    assert "different sizes" in capsys.readouterr().err
