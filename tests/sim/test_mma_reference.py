"""Every MMA of the machine against MMA-Sim (PyPI `mmasim`), written by others, bit for bit.

MMA-Sim's authors report bit equality with the GPUs named here (arXiv 2511.10909). It has no FP8
`mma.sync` for compute capability 9.x and 10.x, where ptxas makes f16 products of it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support import mma_cases
from support.mma_kernel import multiply

CHIPS = {"80": "Ampere", "89": "Ada Lovelace", "90": "Hopper", "100a": "Blackwell",
         "120a": "RTX Blackwell"}  # fmt: skip
FP8 = ("e4m3", "e5m2")
CONTAINERS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")

PLAIN = [
    (chip, f"m16n8k{k}.{result}.{kind}.{kind}.{result}")
    for chip in CHIPS
    for kind, results, sizes in (
        ("f16", ("f32", "f16"), (8, 16)), ("bf16", ("f32",), (8, 16)), ("tf32", ("f32",), (4, 8)),
    )
    for result in results
    for k in sizes
]  # fmt: skip
PLAIN += [
    (chip, f"m16n8k{k}.{result}.{a}.{b}.{result}")
    for chip in ("89", "120a")
    for k in (16, 32)
    for result in ("f32", "f16")
    for a in FP8
    for b in FP8
]
PLAIN += [
    ("120a", f"m16n8k32.kind::f8f6f4.{result}.{a}.{b}.{result}")
    for result in ("f32", "f16")
    for a in CONTAINERS
    for b in CONTAINERS
]
# (K, kind with the vector size, elements, scale, scales of a row, PTX version)
SCALED = [
    (64, "mxf4nvf4", "4X", ("e2m1", "e2m1"), "ue4m3", 4, "8.8"),
    (64, "mxf4nvf4", "4X", ("e2m1", "e2m1"), "ue8m0", 4, "9.1"),
    (64, "mxf4nvf4", "2X", ("e2m1", "e2m1"), "ue8m0", 2, "8.8"),
    (64, "mxf4", "2X", ("e2m1", "e2m1"), "ue8m0", 2, "8.8"),
    *(
        (32, "mxf8f6f4", "1X", (a, b), "ue8m0", 1, "8.8") for a in CONTAINERS for b in CONTAINERS
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """MMA-Sim; it compiles a small extension when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        pytest.importorskip("mmasim", reason="mmasim is not installed (extra `test`)")
        import torch
        from mmasim import nv_ptx

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: threads cost more than they bring
    yield nv_ptx
    torch.set_num_threads(threads)


def tensor(kind: str, codes: np.ndarray) -> Any:
    """Codes as a tensor of the type that MMA-Sim takes for them."""
    import torch

    size, dtype = {
        "f32": (np.int32, torch.float32), "tf32": (np.int32, torch.float32),
        "f16": (np.int16, torch.float16), "bf16": (np.int16, torch.bfloat16),
        "e4m3": (np.uint8, torch.float8_e4m3fn), "e5m2": (np.uint8, torch.float8_e5m2),
        "ue4m3": (np.uint8, torch.float8_e4m3fn), "ue8m0": (np.uint8, torch.float8_e8m0fnu),
    }.get(kind, (np.uint8, torch.uint8))  # fmt: skip
    return torch.from_numpy(np.ascontiguousarray(codes).astype(size)).view(dtype)


def bits(d: Any) -> np.ndarray:
    import torch

    narrow = d.dtype == torch.float16
    array = d.contiguous().view(torch.int16 if narrow else torch.int32).numpy()
    return array.view(np.uint16 if narrow else np.uint32).astype(np.uint32)


def operands(
    rng: np.random.Generator, kinds: tuple[str, str], k: int, warps: int
) -> tuple[np.ndarray, np.ndarray]:
    a = mma_cases.operand(rng, kinds[0], (warps, 16, k))
    b = mma_cases.operand(rng, kinds[1], (warps, 8, k))
    mma_cases.cancel(rng, kinds[0], a, b)
    mma_cases.meet_specials(kinds[0], a, b)
    return a, b


def check_plain(reference: Any, chip: str, form: str, warps: int) -> None:
    shape, *middle, result, kind_a, kind_b, _ = form.split(".")
    kinds, k = (kind_a, kind_b), int(shape.split("k")[1])
    rng = np.random.default_rng(warps + k)
    a, b = operands(rng, kinds, k, warps)
    c = mma_cases.accumulators(rng, result, warps)
    width = {"tf32": 32, "f16": 16, "bf16": 16}.get(kinds[0], 8)
    if kind_a == "tf32":
        a, b = (x << 13 | rng.integers(0, 1 << 13, x.shape) for x in (a, b))
    if middle:
        a, b = (mma_cases.container(kind, x) for kind, x in zip(kinds, (a, b), strict=True))
    ta, tb, tc = tensor(kind_a, a), tensor(kind_b, b), tensor(result, c)
    size = (warps, 16, 8, k)
    want = reference.MMA(CHIPS[chip], form).dpa(
        ta[:, :, None].expand(size), tb[:, None].expand(size), tc
    )
    order = ".".join([shape, "row.col", *middle, result, kind_a, kind_b, result])
    got = multiply(order, a, b, c, bits=width, half=result == "f16", sm=chip)
    np.testing.assert_array_equal(got, bits(want))


def check_scaled(
    reference: Any, k: int, kind: str, vector: str, kinds: tuple[str, str], scale: str,
    count: int, version: str, warps: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(warps + k + count)
    a, b = operands(rng, kinds, k, warps)
    c = mma_cases.accumulators(rng, "f32", warps)
    sa, sb = (mma_cases.scale_bytes(rng, scale, (warps, rows, count)) for rows in (16, 8))
    if k == 64:
        ta, tb = (tensor("e2m1", x[..., ::2] | x[..., 1::2] << 4) for x in (a, b))
    else:
        a, b = (mma_cases.container(kind, x) for kind, x in zip(kinds, (a, b), strict=True))
        ta, tb = tensor(kinds[0], a), tensor(kinds[1], b)
    form = f"m16n8k{k}.kind::{kind}.block{k // count}.f32.{kinds[0]}.{kinds[1]}.f32.{scale}"
    sizes = [(warps, 16, 8, n) for n in (ta.shape[-1], count)]
    want = reference.MMABlockScale("RTX Blackwell", form).dpa(
        ta[:, :, None].expand(sizes[0]),
        tb[:, None].expand(sizes[0]),
        tensor("f32", c),
        tensor(scale, sa)[:, :, None].expand(sizes[1]),
        tensor(scale, sb)[:, None].expand(sizes[1]),
    )
    words = [sum(s[..., i].astype(np.uint32) << 8 * i for i in range(count)) for s in (sa, sb)]
    name = f"kind::{kind}.block_scale.scale_vec::{vector}"
    got = multiply(
        f"m16n8k{k}.row.col.{name}.f32.{kinds[0]}.{kinds[1]}.f32.{scale}",
        a, b, c, bits=256 // k, scales=(words[0], words[1]), version=version,
    )  # fmt: skip
    np.testing.assert_array_equal(got, bits(want))


@pytest.mark.parametrize(("chip", "form"), PLAIN)
def test_plain_kinds(reference: Any, chip: str, form: str) -> None:
    """5,120 outputs of each form on each generation that has it."""
    check_plain(reference, chip, form, 40)


@pytest.mark.parametrize(("k", "kind", "vector", "kinds", "scale", "count", "version"), SCALED)
def test_block_scaled_kinds(
    reference: Any, k: int, kind: str, vector: str, kinds: tuple[str, str], scale: str,
    count: int, version: str,
) -> None:  # fmt: skip
    """5,120 outputs of each block-scaled form, with every scale byte."""
    check_scaled(reference, k, kind, vector, kinds, scale, count, version, 40)


@pytest.mark.foreign
@pytest.mark.parametrize(("chip", "form"), PLAIN)
def test_a_million_outputs_of_plain_kinds(reference: Any, chip: str, form: str) -> None:
    """1,000,064 outputs of each form."""
    check_plain(reference, chip, form, 7813)


@pytest.mark.foreign
@pytest.mark.parametrize(("k", "kind", "vector", "kinds", "scale", "count", "version"), SCALED)
def test_a_million_outputs_of_block_scaled_kinds(
    reference: Any, k: int, kind: str, vector: str, kinds: tuple[str, str], scale: str,
    count: int, version: str,
) -> None:  # fmt: skip
    """1,000,064 outputs of each form."""
    check_scaled(reference, k, kind, vector, kinds, scale, count, version, 7813)
