"""Tensor copies into shared memory: every box, swizzle and type against one element at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fp4 import sim
from oracles.tensor_box import SWIZZLES, TYPES, Tensor, image
from support.tensor_boxes import boxes, extent
from support.tensor_copy import (
    COPY_OUT,
    FIRST_LINE,
    INIT,
    START,
    WAIT,
    encoded,
    launch,
    load_body,
)  # fmt: skip

UNCHECKED = sim.Checks(uninitialized=False)  # so that gaps and canaries can be read
CANARY = 0xCC  # what shared memory holds before anything writes it


def memory_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def loaded(
    tensor: Tensor, memory: np.ndarray, coordinates: tuple[int, ...], offset: int = 0,
    rows: tuple[int, ...] | None = None, body: str = "", seed: int = 0,
) -> None:  # fmt: skip
    """Loads a box `offset` bytes into shared memory; that, and nothing around it, has changed."""
    machine = sim.Machine("100a", seed, UNCHECKED)
    copies = 1 if rows is None else 4
    size = tensor.shared_bytes * copies
    out = np.zeros((offset + size + 64 + 3) // 4 * 4, np.uint8)
    launch(
        machine, body or load_body(len(tensor.dims)), encoded(machine, tensor, memory), out,
        coordinates if rows is None else (coordinates[0], *rows), tensor.copied_bytes * copies,
        offset,
    )  # fmt: skip
    data, mask = image(tensor, memory, coordinates, START + offset, rows)
    expected = np.full(out.size, CANARY, np.uint8)
    expected[offset : offset + size][mask] = data[mask]
    np.testing.assert_array_equal(out, expected)


@given(boxes(), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_loads_are_those_of_the_oracle(
    case: tuple[Tensor, tuple[int, ...], int], seed: int
) -> None:
    """Any box: rank, strides, element strides, types with and without gaps, edges, swizzles."""
    tensor, coordinates, offset = case
    memory = memory_of(extent(tensor) + 512, seed % 1000)
    loaded(tensor, memory, coordinates, offset, seed=seed)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_type_with_every_swizzle(name: str) -> None:
    """The whole table, with a box that hangs over two edges of the tensor."""
    bits, sixteen = TYPES[name]
    padded = sixteen * 8 != bits * 16
    for swizzle in ["none", "128b", "128b_atom_32b"] if padded else SWIZZLES:
        inner = 128 if padded else (SWIZZLES[swizzle][0] or 32) * 8 // bits
        tensor = Tensor(name, (2 * inner, 9), (inner * bits // 4 + 32,), (inner, 16), swizzle)
        unit = 128 if padded else 2
        loaded(tensor, memory_of(8192), (inner // unit * unit, -3), 256)
        loaded(tensor, memory_of(8192), (-unit, 2), 0)


TILE = Tensor("uint8", (256, 64), (256,), (128, 16), "128b")


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("group", ["", ".cta_group::1", ".cta_group::2"])
@pytest.mark.parametrize("mode", ["", ".tile", ".tile::gather4"])
@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_every_spelling_of_a_load(space: str, mode: str, group: str, hint: str) -> None:
    """Modifiers, also in other orders than the manual's, and the cache policy."""
    gather = mode == ".tile::gather4"
    tensor = Tensor("uint8", (256, 64), (256,), (128, 1 if gather else 16), "128b")
    parts = f".{space}.global{mode}.mbarrier::complete_tx::bytes{group}{hint}"
    policy = "mov.u64 a3, 0x1000000000000000;\n" if hint else ""
    coordinates = "c0, c1, c2, c3, c4" if gather else "c0, c1"
    other = f"{group}.{space}.global.mbarrier::complete_tx::bytes{hint}{mode}"
    for name in (f"cp.async.bulk.tensor.2d{parts}", f"cp.async.bulk.tensor.2d{other}"):
        body = (
            INIT + "@!p bra W;\nmbarrier.arrive.expect_tx.shared.b64 _, [r1], r4;\n" + policy
            + f"{name} [r3], [map, {{{coordinates}}}], [r1]{', a3' if hint else ''};\n"
            + WAIT + COPY_OUT
        )  # fmt: skip
        rows = (5, 63, 64, -1) if gather else None
        loaded(tensor, memory_of(16384), (128, 40), 128, rows, body, seed=3)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("group", ["", ".cta_group::1", ".cta_group::2"])
@pytest.mark.parametrize(
    "space", ["shared::cta", "shared::cluster", "shared::cluster.multicast::cluster"]
)
def test_ranks_with_immediate_coordinates(space: str, group: str, rank: int) -> None:
    """Coordinates may be constants; a cluster of one CTA may multicast to itself."""
    dims = (64, 3, 4, 2, 3)[:rank]
    strides = (64, 192, 768, 1536)[: rank - 1]
    tensor = Tensor("uint8", dims, strides, (32, 2, 2, 2, 2)[:rank])
    place = (16, -1, 1, 0, 2)[:rank]
    name = f"cp.async.bulk.tensor.{rank}d.{space}.global.mbarrier::complete_tx::bytes{group}"
    body = load_body(rank, name, ", ".join(map(str, place)))
    if "multicast" in space:
        body = body.replace("}], [r1];", "}], [r1], h0;").replace("@!p", "mov.b16 h0, 1; @!p", 1)
    loaded(tensor, memory_of(8192), place, 128, body=body)


@pytest.mark.parametrize("group", ["", ".cta_group::1", ".cta_group::2"])
def test_rows_may_be_multicast(group: str) -> None:
    """.tile::gather4 with a mask of CTAs."""
    tensor = Tensor("uint8", (256, 64), (256,), (128, 1), "128b")
    name = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4"
        f".mbarrier::complete_tx::bytes.multicast::cluster{group}"
    )
    body = load_body(2, name, "c0, c1, c2, c3, c4").replace("}], [r1];", "}], [r1], h0;")
    body = body.replace("@!p", "mov.b16 h0, 1; @!p", 1)
    loaded(tensor, memory_of(16384), (128, 40), 128, (5, 63, 64, -1), body)


def test_a_map_in_global_memory_and_in_a_register() -> None:
    """The map's address is generic: of a parameter, of constant or of global memory."""
    memory = memory_of(16384)
    for setup in (
        "mov.b64 a3, map; cvta.param.u64 a3, a3;",
        "ld.param.u64 a3, [map];",
    ):
        machine = sim.Machine("100a", 1)
        bytes_of_map = encoded(machine, TILE, memory)
        if "ld" in setup:
            in_memory = np.frombuffer(bytearray(bytes_of_map), np.uint8)
            bytes_of_map = machine.address(in_memory).to_bytes(8, "little") + bytes(120)
        out = np.zeros(2048, np.uint8)
        body = load_body(2).replace("[map,", "[a3,").replace("@!p bra W;", setup + "@!p bra W;")
        launch(machine, body, bytes_of_map, out, (128, 7), TILE.copied_bytes)
        np.testing.assert_array_equal(out, image(TILE, memory, (128, 7), START)[0])


def test_reads_of_gaps_are_reported() -> None:
    """The gaps of padded types count as unwritten after the load, the elements do not."""
    memory = memory_of(4096)
    for name, data in (("16u4_align16b", 8), ("16u6_align16b", 12)):
        tensor = Tensor(name, (128, 4), (96,), (128, 4), "128b")
        for at in (0, data - 1, data, 15):
            machine = sim.Machine("100a")
            body = load_body(2).split("mov.u32 r6")[0] + f"ld.shared.u8 h0, [r3+{at}];\n"
            args = (machine, body, encoded(machine, tensor, memory), np.zeros(1024, np.uint8),
                    (0, 0), tensor.copied_bytes)  # fmt: skip
            if at < data:
                launch(*args)
                continue
            with pytest.raises(sim.SimulationError) as caught:
                launch(*args)
            assert (caught.value.kind, caught.value.line) == (
                "uninitialized-memory", FIRST_LINE + body.count("\n") - 1,
            )  # fmt: skip


def test_sub_byte_types_on_sm_120() -> None:
    """sm_12x loads them to .shared::cta, and not to .shared::cluster."""
    tensor = Tensor("16u4_align8b", (256, 8), (128,), (256, 4), "128b")
    atoms = Tensor("uint8", (256, 8), (256,), (128, 4), "128b_atom_32b")
    memory = memory_of(4096)
    for space, fine in (("shared::cta", True), ("shared::cluster", False)):
        for each in (tensor, atoms):
            machine = sim.Machine("120a")
            name = f"cp.async.bulk.tensor.2d.{space}.global.mbarrier::complete_tx::bytes"
            out = np.zeros(each.shared_bytes, np.uint8)
            args = (machine, load_body(2, name), encoded(machine, each, memory), out, (0, 0),
                    each.copied_bytes)  # fmt: skip
            if fine:
                launch(*args, target="120a")
                np.testing.assert_array_equal(out, image(each, memory, (0, 0), START)[0])
                continue
            with pytest.raises(
                sim.SimulationError, match=r"which sm_12x loads to \.shared::cta"
            ) as e:
                launch(*args, target="120a")
            assert (e.value.kind, e.value.line) == ("argument", FIRST_LINE + 3)


# name: (kind, part of the message, tensor, coordinates, offset, change of the body)
WRONG = {
    "rank": ("argument", "has 2 dimensions, and the instruction 3", TILE, (0, 0, 0), 0,
             lambda _: load_body(3)),
    "short rows": ("argument", "rows of 64 bytes and a swizzle of 128",
                   Tensor("uint8", (256, 64), (256,), (64, 16), "128b"), (0, 0), 0, None),
    "rounding type": ("argument", "copies round",
                      Tensor("tfloat32", (256, 64), (1024,), (32, 16)), (0, 0), 0, None),
    "gathered boxes": ("argument", "has boxes of 16 rows", TILE, (0, 0), 0, lambda _: load_body(
        2, "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes",
        "c0, c1, c2, c3, c4")),
    "destination": ("misaligned", "the destination is at address 2112; it is aligned to 128", TILE,
                    (0, 0), 64, None),
    "padded coordinate": ("argument", "the first coordinate is 64; for this type it is a multiple "
                          "of 128", Tensor("16u4_align16b", (256, 8), (128,), (128, 4)), (64, 0), 0,
                          None),
    "odd coordinate": ("argument", "the first coordinate is 3; for this type it is a multiple of 2",
                       Tensor("16u4_align8b", (256, 8), (128,), (32, 4)), (3, 0), 0, None),
    "no map": ("argument", "these 128 bytes are no tensor map", None, (0, 0), 0, None),
    "map's place": ("misaligned", "a tensor map is at address", TILE, (0, 0), 0,
                    lambda body: body.replace("[map,", "[map+16,")),
    "barrier": ("misaligned", "the mbarrier is at address 1028", TILE, (0, 0), 0,
                lambda body: body.replace("}], [r1]", "}], [r1+4]")),
    "outside shared memory": ("out-of-bounds", "is outside the CTA's", TILE, (0, 0), 4096, None),
    "outside global memory": ("out-of-bounds", "outside every buffer",
                              Tensor("uint8", (256, 640), (256,), (128, 16)), (0, 600), 0, None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_reported(name: str) -> None:
    """Each rule of a load, broken once."""
    kind, message, tensor, coordinates, offset, change = WRONG[name]
    machine = sim.Machine("100a")
    memory = memory_of(16384)
    data = encoded(machine, tensor, memory) if tensor else bytes(128)
    body = load_body(2)
    body = change(body) if change else body
    with pytest.raises(sim.SimulationError) as caught:
        launch(machine, body, data, np.zeros(2048, np.uint8), coordinates, 2048, offset)
    assert (caught.value.kind, caught.value.line) == (kind, FIRST_LINE + 3)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("instruction", "operands"),
    [
        ("2d.shared::cta.global.mbarrier::complete_tx::bytes", "[r3], [map, {c0}], [r1]"),
        ("1d.shared::cta.global.mbarrier::complete_tx::bytes", "[r3], [map, {c0, c1}], [r1]"),
        ("2d.shared::cta.global.mbarrier::complete_tx::bytes", "[r3], [map], [r1]"),
        ("2d.shared::cta.global.mbarrier::complete_tx::bytes", "[r3], [map, c0, c1], [r1]"),
        ("2d.shared::cta.global.mbarrier::complete_tx::bytes", "[r3], [map, {c0, c1}], [r1], a3"),
        (
            "2d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint",
            "[r3], [map, {c0, c1}], [r1]",
        ),
        ("3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes", "[r3], [map, {c0}], [r1]"),
    ],
)
def test_wrong_forms_do_not_load(instruction: str, operands: str) -> None:
    """Coordinates and the cache policy are as many as the modifiers say; im2col is not modelled."""
    from support.tensor_copy import text_of

    with pytest.raises(sim.PtxError, match=f"line {FIRST_LINE}"):
        sim.Machine("100a").load(text_of(f"cp.async.bulk.tensor.{instruction} {operands};\n"))
