"""Tensor copies out of shared memory: stores, reductions, scattered rows, prefetches."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fp4 import sim
from oracles.tensor_box import SWIZZLES, TYPES, Tensor, stored
from support.tensor_boxes import boxes, extent
from support.tensor_copy import COPY_IN, FIRST_LINE, START, encoded, launch, store_body


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def check_store(
    tensor: Tensor,
    coordinates: tuple[int, ...],
    offset: int = 0,
    rows: tuple[int, ...] | None = None,
    body: str = "",
    seed: int = 0,
    memory: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    reduce: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> None:
    """Stores a box that lies `offset` bytes into shared memory; nothing else changes."""
    size = tensor.shared_bytes * (1 if rows is None else 4)
    if memory is None:
        memory = random_bytes(extent(tensor) + 512, seed % 1000)
    if shared is None:
        shared = random_bytes(offset + size + 64, seed % 1000 + 1)
    box = shared[offset : offset + size]
    expected = stored(tensor, memory, box, coordinates, START + offset, rows, reduce)
    machine = sim.Machine("100a", seed)
    padded = np.resize(shared, -(-shared.size // 4) * 4)
    launch(
        machine, body or store_body(len(tensor.dims)), encoded(machine, tensor, memory), padded,
        coordinates if rows is None else (coordinates[0], *rows), 0, offset,
    )  # fmt: skip
    np.testing.assert_array_equal(memory, expected)


@given(boxes(stores=True), st.integers(0, 2**32 - 1))
@settings(max_examples=120)
def test_stores_are_those_of_the_oracle(
    case: tuple[Tensor, tuple[int, ...], int], seed: int
) -> None:
    """Any box; what is outside the tensor is not written."""
    check_store(*case, seed=seed)


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"16u4_align16b"}))
def test_every_type_with_every_swizzle(name: str) -> None:
    """The whole table but what only loads have, with a box over two edges of the tensor."""
    bits, sixteen = TYPES[name]
    padded = sixteen * 8 != bits * 16
    for swizzle in ["none", "128b", "128b_atom_32b", "128b_atom_64b"] if padded else SWIZZLES:
        if "flip" in swizzle:
            continue
        inner = 128 if padded else (SWIZZLES[swizzle][0] or 32) * 8 // bits
        tensor = Tensor(name, (2 * inner, 9), (inner * bits // 4 + 32,), (inner, 16), swizzle)
        check_store(tensor, (inner // (128 if padded else 2) * (128 if padded else 2), 4), 128)
        check_store(tensor, (0, 0), 0)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("mode", ["", ".tile", ".tile::scatter4"])
def test_every_spelling_of_a_store(mode: str, hint: str) -> None:
    """Modes and the cache policy; the four rows of .tile::scatter4 may lie outside."""
    scatter = "scatter" in mode
    tensor = Tensor("uint8", (256, 64), (256,), (128, 1 if scatter else 16), "128b")
    name = f"cp.async.bulk.tensor.2d.global.shared::cta{mode}.bulk_group{hint}"
    body = store_body(2, name, "c0, c1, c2, c3, c4" if scatter else "c0, c1")
    if hint:
        body = body.replace("], [r3];", "], [r3], a3;").replace(
            "@!p bra W;", "mov.u64 a3, 0x14F0000000000000; @!p bra W;"
        )
    check_store(tensor, (192, 50), 128, (7, 64, 63, 0) if scatter else None, body, 4)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_ranks_of_stores_reductions_and_prefetches(rank: int) -> None:
    """The same box three ways; a prefetch changes nothing."""
    strides = (64, 192, 768, 1536)[: rank - 1]
    tensor = Tensor("uint32", (16, 3, 4, 2, 3)[:rank], strides, (8, 2, 2, 2, 2)[:rank])
    place = (12, 2, 1, 0, 2)[:rank]
    check_store(tensor, place, 128)
    name = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group"
    check_store(tensor, place, 128, None, store_body(rank, name), reduce=OPERATIONS["add"][0])
    for hint, policy in (("", ""), (".L2::cache_hint", ", a3")):
        for mode in ("", ".tile"):
            memory = random_bytes(4096, 1)
            machine = sim.Machine("100a")
            coordinates = ", ".join(map(str, place))
            body = (
                f"mov.u64 a3, 0; cp.async.bulk.prefetch.tensor.{rank}d.L2.global{mode}{hint} "
                f"[map, {{{coordinates}}}]{policy};\n"
            )
            data = encoded(machine, tensor, memory)
            launch(machine, body, data, np.zeros(64, np.uint8))
            np.testing.assert_array_equal(memory, random_bytes(4096, 1))


def test_prefetches_of_rows_and_of_tensor_maps() -> None:
    """.tile::gather4 takes five coordinates; prefetch.tensormap any space that holds one."""
    tensor = Tensor("uint8", (256, 64), (256,), (128, 1), "128b")
    machine = sim.Machine("100a")
    body = (
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [map, {0, 1, 2, 3, 99}]; "
        "prefetch.param.tensormap [map]; mov.b64 a3, map; cvta.param.u64 a3, a3; "
        "prefetch.tensormap [a3];\n"
    )
    data = encoded(machine, tensor, random_bytes(16384, 0))
    launch(machine, body, data, np.zeros(64, np.uint8))
    module = ".const .align 64 .b8 constant[128];\n"
    from support.ptx_kernel import run

    run("prefetch.const.tensormap [constant];", module=module)
    with pytest.raises(sim.SimulationError, match="a tensor map is at address") as caught:
        launch(
            machine, "add.u64 a3, a0, 4; prefetch.tensormap [a3];\n", data, np.zeros(64, np.uint8)
        )
    assert (caught.value.kind, caught.value.line) == ("misaligned", FIRST_LINE)


def integer(function: Callable[[int, int, int], int]) -> Callable[..., Callable[..., np.ndarray]]:
    """A reduction of two integers of some width, from Python's own arithmetic."""

    def of_type(dtype: type) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        bits = np.dtype(dtype).itemsize * 8

        def reduce(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            result = function(int(old.view(dtype)[0]), int(new.view(dtype)[0]), bits)
            return np.array([result & ((1 << bits) - 1)], f"<u{bits // 8}")

        return reduce

    return of_type


def real(function: Callable[[float, float], float]) -> Callable[..., Callable[..., np.ndarray]]:
    """A reduction of two floating-point numbers, in double precision and rounded once."""

    def of_type(dtype: type) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        def reduce(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            a, b = float(old.view(dtype)[0]), float(new.view(dtype)[0])
            return np.array([function(a, b)], np.float64).astype(dtype)

        return reduce

    return of_type


INTEGERS = {
    "add": integer(lambda a, b, n: a + b),
    "min": integer(lambda a, b, n: min(a, b)),
    "max": integer(lambda a, b, n: max(a, b)),
    "inc": integer(lambda a, b, n: 0 if a >= b else a + 1),
    "dec": integer(lambda a, b, n: b if a == 0 or a > b else a - 1),
    "and": integer(lambda a, b, n: a & b),
    "or": integer(lambda a, b, n: a | b),
    "xor": integer(lambda a, b, n: a ^ b),
}
REALS = {"add": real(lambda a, b: a + b), "min": real(min), "max": real(max)}
OPERATIONS = {"add": (INTEGERS["add"](np.uint32),)}
DTYPES = {
    "uint32": np.uint32, "int32": np.int32, "uint64": np.uint64, "int64": np.int64,
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
}  # fmt: skip
# PTX ISA 9.7.9.25.5.3
REDUCTIONS = {
    "add": ("uint32", "int32", "uint64", "float32", "float16", "bfloat16"),
    "min": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "max": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "inc": ("uint32",),
    "dec": ("uint32",),
    **{op: ("uint32", "int32", "uint64", "int64") for op in ("and", "or", "xor")},
}


def numbers(dtype: type, size: int, seed: int) -> np.ndarray:
    """Numbers whose sums are exact in float32, or any integers, with small ones among them."""
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, size, dtype, endpoint=True)
        return np.where(rng.random(size) < 0.3, values % 4, values).astype(dtype)
    return (rng.integers(-255, 256, size) / 8).astype(dtype)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op: str) -> None:
    """Every operation with every type that has it, element by element; others are refused."""
    for seed, (name, dtype) in enumerate(DTYPES.items()):
        bits = TYPES[name][0]
        inner = 1024 // bits
        tensor = Tensor(name, (2 * inner, 6), (256,), (inner, 4), "128b")
        body = store_body(2, f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.bulk_group")
        memory = numbers(dtype, 6 * 256 * 8 // bits, seed).view(np.uint8)
        shared = numbers(dtype, 512 * 8 // bits, seed + 50).view(np.uint8)
        table = INTEGERS if np.issubdtype(dtype, np.integer) else REALS
        args = (tensor, (inner // 2, 4), 0, None, body, seed, memory, shared)
        if name in REDUCTIONS[op]:
            check_store(*args, reduce=table[op](dtype))
            continue
        with pytest.raises(sim.SimulationError, match="this reduction does not take") as caught:
            check_store(*args, reduce=lambda old, new: old)
        assert caught.value.kind == "argument"


def test_reductions_of_special_numbers() -> None:
    """add.f32 flushes subnormals; min and max of halves ignore NaN and order the zeros."""
    tensor = Tensor("float32", (32,), (), (32,))
    tiny = np.array([1e-40, -1e-40, np.float32(2) ** -126, np.inf], np.float32)
    other = np.array([1e-40, 0, -np.float32(1.5) * np.float32(2) ** -126, -np.inf], np.float32)
    expected = np.array([0, 0, -0.0, np.nan], np.float32)
    memory, shared = np.tile(tiny, 8).view(np.uint8), np.tile(other, 8).view(np.uint8)
    machine = sim.Machine("100a")
    name = "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group"
    launch(machine, store_body(1, name), encoded(machine, tensor, memory), shared, (0,))
    got = memory.view(np.uint32)[:4]
    np.testing.assert_array_equal(got[:3], expected.view(np.uint32)[:3])
    assert got[3] == 0x7FFFFFFF
    for name_of_type, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        tensor = Tensor(name_of_type, (64,), (), (64,))
        a = np.array([np.nan, 1, np.nan, -0.0, 0.0, -2, -2, 3], dtype)
        b = np.array([1, np.nan, np.nan, 0.0, -0.0, -3, 1, 4], dtype)
        for op, wanted in (
            ("min", [1, 1, np.nan, -0.0, -0.0, -3, -2, 3]),
            ("max", [1, 1, np.nan, 0.0, 0.0, -2, 1, 4]),
        ):
            memory, shared = np.tile(a, 8).view(np.uint8), np.tile(b, 8).view(np.uint8)
            machine = sim.Machine("100a")
            name = f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{op}.bulk_group"
            launch(machine, store_body(1, name), encoded(machine, tensor, memory), shared, (0,))
            bits = np.array(wanted, dtype).view(np.uint16)
            bits[2] = 0x7FFF
            np.testing.assert_array_equal(memory.view(np.uint16)[:8], bits)


TILE = Tensor("uint8", (256, 64), (256,), (128, 16), "128b")
# name: (kind, part of the message, tensor, coordinates, offset)
WRONG = {
    "negative": ("argument", "coordinate 1 of a store is -1", TILE, (0, -1), 0),
    "source": ("misaligned", "the source is at address 2064", TILE, (0, 0), 16),
    "padded type": ("argument", "16U4_ALIGN16B, for loads only",
                    Tensor("16u4_align16b", (256, 64), (128,), (128, 16)), (0, 0), 0),
    "flipped": ("argument", "128B_ATOM_32B_FLIP_8B, for loads only",
                Tensor("uint8", (256, 64), (256,), (128, 16), "128b_atom_32b_flip_8b"), (0, 0), 0),
    "unwritten source": ("uninitialized-memory", "which nothing has written", TILE, (0, 0), 1024),
    "outside shared memory": ("out-of-bounds", "outside the CTA's", TILE, (0, 0), 4096),
    "read-only tensor": ("read-only", "which is read only", TILE, (0, 0), 0),
    "outside the buffer": ("out-of-bounds", "outside every buffer",
                           Tensor("uint8", (256, 640), (256,), (128, 16)), (0, 600), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_stores_are_reported(name: str) -> None:
    """Each rule of a store, broken once."""
    kind, message, tensor, coordinates, offset = WRONG[name]
    machine = sim.Machine("100a")
    memory = random_bytes(16384, 0)
    memory.flags.writeable = name != "read-only tensor"
    body = store_body(2)
    with pytest.raises(sim.SimulationError) as caught:
        launch(
            machine, body, encoded(machine, tensor, memory), random_bytes(2048, 1), coordinates, 0,
            offset, smem=4096,
        )  # fmt: skip
    line = FIRST_LINE + COPY_IN.count("\n") + 1
    assert (caught.value.kind, caught.value.line) == (kind, line)
    assert message in str(caught.value)
