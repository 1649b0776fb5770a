"""tcgen05.mma: what is wrong is reported at its line, or gives other numbers."""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles.shared_layout import Descriptor
from support.umma_forms import (
    BLOCK32,
    F16,
    FP8,
    HALF,
    I8,
    MXFP4,
    MXFP8,
    NVFP4,
    TF32,
    name,
)
from support.umma_problem import SFA, SFB, Instance, Problem, with_


def fault(instance: Instance, seed: int = 0) -> sim.SimulationError:
    """What the run reports; its line must be the instruction's."""
    with pytest.raises(sim.SimulationError) as caught:
        instance.run(seed)
    assert caught.value.line == instance.run.line()
    return caught.value


# (problem, bits of the descriptor to flip, a part of the message)
DESCRIPTOR_BITS = [
    (
        NVFP4,
        1 << 0,
        "bits 1:0 (sparsity selector)",
    ),
    (
        F16,
        1 << 2,
        "bit 2 (sparsity)",
    ),
    (NVFP4, 1 << 3, "bit 3 (reserved)"),
    (F16, 1 << 3, "bit 3 (saturate)"),
    (NVFP4, 2 << 4, "bits 5:4 (SFB id) of the instruction descriptor: got 2, expected 0"),
    (BLOCK32, 1 << 4, "bits 5:4 (SFB id) of the instruction descriptor: got 1, expected 0, 2"),
    (F16, 3 << 4, "bits 5:4 (type of D) of the instruction descriptor: got 2, expected 0, 1"),
    (TF32, 1 << 4, "bits 5:4 (type of D)"),
    (I8, 3 << 4, "bits 5:4 (type of D)"),
    (FP8, 1 << 6, "bit 6 (reserved)"),
    (NVFP4, 4 << 7, "bits 9:7 (type of A) of the instruction descriptor: got 5, expected 1"),
    (
        FP8,
        2 << 7,
        "(type of A) of the instruction descriptor: got 2, expected 0, 1, 3, 4, 5",
    ),
    (TF32, 1 << 7, "bits 9:7 (type of A)"),
    (I8, 2 << 7, "bits 9:7 (type of A)"),
    (NVFP4, 2 << 10, "bits 11:10 (type of B)"),
    (MXFP8, 7 << 10, "bits 12:10 (type of B)"),
    (F16, 1 << 10, "expected 0 for .kind::f16 where A has this type"),
    (HALF, 1 << 7 | 1 << 10, "bits 9:7 (type of A)"),
    (MXFP4, 1 << 12, "bit 12 (reserved)"),
    (I8, 1 << 13, "bit 13 (negate A)"),
    (I8, 1 << 14, "bit 14 (negate B)"),
    (NVFP4, 1 << 15, "bit 15 (transpose A) of the instruction descriptor: got 1, expected 0"),
    (MXFP4, 1 << 16, "bit 16 (transpose B)"),
    (MXFP4, 1 << 23, "bit 23 (scale type) of the instruction descriptor: got 0, expected 1"),
    (BLOCK32, 1 << 23, "bit 23 (scale type)"),
    (MXFP8, 1 << 23, "bit 23 (scale type)"),
    (F16, 1 << 23, "bit 23 (reserved)"),
    (NVFP4, 1 << 24, "bits 26:24 (reserved)"),
    (F16, 1 << 29, "bit 29 (reserved)"),
    (F16, 1 << 30, "bits 31:30 (maximum shift) of the instruction descriptor: got 1, expected 0"),
    (NVFP4, 1 << 30, "bits 30:29 (SFA id)"),
    (NVFP4, 1 << 31, "K = 96 is not modelled"),
    (MXFP8, 1 << 31, "bit 31 (reserved)"),
    (NVFP4, 3 << 27, "M of the instruction descriptor: got 256, expected 128"),
    (F16, 3 << 27, "M of the instruction descriptor: got 256, expected 64 or 128"),
    (NVFP4, 2 << 17, "N of the instruction descriptor: got 0, expected a multiple of 8 to 256"),
    (FP8, 32 << 17, "N of the instruction descriptor: got 272"),
    (I8, 7 << 17, "N of the instruction descriptor: got 40, expected 8, 16, 24, 32 and multiples"),
]


@pytest.mark.parametrize(("problem", "bits", "text"), DESCRIPTOR_BITS, ids=name)
def test_instruction_descriptors(problem: Problem, bits: int, text: str) -> None:
    """Every field that does not suit the kind is named, with what it holds and may hold."""
    instance = Instance(problem)
    instance.mma.idesc ^= bits
    error = fault(instance)
    assert error.kind == "argument" and text in str(error)


@pytest.mark.parametrize(
    ("problem", "n", "text"),
    [
        (F16, 24, "N of the instruction descriptor: got 24, expected a multiple of 16 to 256"),
        (I8, 48, "N of the instruction descriptor: got 48, expected a multiple of 32 to 256"),
    ],
    ids=name,
)
def test_shapes_of_pairs(problem: Problem, n: int, text: str) -> None:
    """Pairs take fewer N."""
    instance = Instance(with_(problem, m=256, group=2, n=32))
    instance.mma.idesc = with_(instance.problem, n=n).idesc
    assert text in str(fault(instance))


MATRIX = [
    (Descriptor(0, 16, 1024, "128B").bits | 1 << 53, "argument", "of A, 0x"),
    (Descriptor(128, 16, 1024, "128B").bits, "misaligned", "not in the first row"),
    (Descriptor(112, 16, 1024, "128B").bits, "misaligned", "112 bytes into a row of 128"),
    (Descriptor(0, 16, 1040, "128B").bits, "misaligned", "1040 is not a multiple of 1024"),
    (Descriptor(0, 16, 1024, "128B_atom_32B").bits, "argument", "K-major matrices do not have"),
]


@pytest.mark.parametrize(("bits", "kind", "text"), MATRIX)
def test_matrix_descriptors(bits: int, kind: str, text: str) -> None:
    """A descriptor that cannot be is refused where the instruction is issued."""

    class Raw(Descriptor):
        @property
        def bits(self) -> int:
            return bits

    instance = Instance(NVFP4)
    instance.mma.a = Raw(0, 0, 0)
    error = fault(instance)
    assert error.kind == kind and text in str(error) and "matrix descriptor of A" in str(error)
    instance.mma.a, instance.mma.b = instance.problem.descriptor(0), Raw(0, 0, 0)
    assert "matrix descriptor of B" in str(fault(instance))


def test_transposes_that_are_not_modelled() -> None:
    """32-bit elements along M or N without atoms of 32 bytes, 16-bit ones with them; short rows."""
    instance = Instance(with_(TF32, n=32, majors=("mn", "k"), swizzles=("128B_atom_32B", "128B")))
    instance.mma.a = Descriptor(0, 4096, 1024, "128B")
    assert "32-bit MN-major matrices have a swizzle of 1" in str(fault(instance))
    instance = Instance(with_(F16, n=64, majors=("k", "mn")))
    instance.mma.b = Descriptor(32768, 4096, 512, "128B_atom_32B")
    assert "goes with 32-bit MN-major matrices only" in str(fault(instance))
    instance = Instance(with_(FP8, n=16))
    instance.mma.idesc = with_(FP8, n=24, majors=("k", "mn")).idesc
    assert "24 rows are no multiple of the 16 elements" in str(fault(instance))


@pytest.mark.parametrize(
    ("problem", "changes", "text"),
    [
        (NVFP4, {"d": 16 << 16}, "the address of D, 0x100000, names lane 16; expected lane 0"),
        (with_(F16, m=64), {"d": 8 << 16}, "names lane 8; expected lane 0 or 16"),
        (NVFP4, {"sfa": SFA | 32 << 16}, "the scale factors of A, 0x200100, names lane 32"),
        (NVFP4, {"sfb": SFB | 64 << 16}, "the scale factors of B"),
        (with_(F16, tensor_a=True), {"a": 1 << 16}, "the address of A"),
    ],
    ids=name,
)
def test_lanes_of_addresses(problem: Problem, changes: dict[str, int], text: str) -> None:
    """Operands in tensor memory begin at lane 0."""
    instance = Instance(problem)
    instance.run.mmas = [instance.mma.with_(**changes)]
    error = fault(instance)
    assert error.kind == "argument" and text in str(error)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (with_(F16, m=64, tensor_a=True), "A in tensor memory with M = 64 is not modelled"),
        (with_(F16, m=128, n=32, group=2, tensor_a=True), "with M = 128 is not modelled"),
        (with_(FP8, a="e2m1", tensor_a=True), "elements of 4 bits is not modelled"),
        (with_(MXFP8, a="e3m2", tensor_a=True), "elements of 6 bits is not modelled"),
        (with_(F16, tensor_a=True, majors=("mn", "k")), "has no transpose bit"),
    ],
    ids=name,
)
def test_a_in_tensor_memory_where_its_place_is_unknown(problem: Problem, text: str) -> None:
    """What only a figure describes is refused."""
    error = fault(Instance(problem))
    assert error.kind == "argument" and text in str(error)


def test_scale_factors_of_a_pair_of_128_rows() -> None:
    """Their place is not documented."""
    instance = Instance(with_(NVFP4, m=256, n=32, group=2))
    instance.mma.idesc = with_(instance.problem, m=128).idesc
    assert "block scaling with M = 128 and .cta_group::2" in str(fault(instance))


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("seed", range(3))
def test_a_missing_proxy_fence(operand: str, seed: int) -> None:
    """Shared memory that st.shared has written is not visible without fence.proxy.async."""
    instance = Instance(with_(F16, tensor_a=operand == "b"))
    instance.run.fence = ""
    error = fault(instance, seed)
    assert error.kind == "proxy" and "no fence.proxy.async" in str(error)


def test_shared_memory_that_nothing_wrote() -> None:
    """B's last rows are missing."""
    instance = Instance(NVFP4)
    instance.run.written = 32768
    assert fault(instance).kind == "uninitialized-memory"


@pytest.mark.parametrize("problem", [NVFP4, F16, with_(F16, tensor_a=True)], ids=name)
def test_tensor_memory_that_nothing_wrote(problem: Problem) -> None:
    """Scale factors, the accumulator, A."""
    instance = Instance(problem)
    instance.run.filled = 256 if problem.scale or problem.tensor_a else 0
    instance.run.dumped = (0, 0)
    assert fault(instance).kind == "uninitialized-memory"


def test_operands_outside_their_memory() -> None:
    """D beyond the allocated columns; a matrix beyond the CTA's shared memory."""
    instance = Instance(with_(F16, n=64))
    instance.mma.d = 480
    assert fault(instance).kind == "out-of-bounds"
    instance = Instance(F16)
    instance.mma.b = Descriptor(60 * 1024, 16, 8192, "128B")
    assert fault(instance).kind == "out-of-bounds"


@pytest.mark.parametrize(("row", "quarter"), [(0, 1), (31, 2), (100, 3)])
def test_scale_factors_that_differ_between_quarters(row: int, quarter: int) -> None:
    """All four copies of a word must be there."""
    instance = Instance(NVFP4)
    instance.tensor[0, 32 * quarter + row % 32, SFA + row // 32] ^= 0x0100
    error = fault(instance)
    assert error.kind == "argument"
    assert f"the scale factors of A, row {row}: column {SFA + row // 32}" in str(error)


def test_an_odd_column_of_scale_factors_of_b() -> None:
    """It works here, with a warning."""
    instance = Instance(NVFP4)
    instance.tensor[0, :, SFB + 1 : SFB + 9] = instance.tensor[0, :, SFB : SFB + 8].copy()
    instance.mma.sfb = SFB + 1
    instance.check()
    assert any("which is odd" in w for w in instance.run.report.warnings)


def test_ids_in_the_address_of_scale_factors_are_ignored() -> None:
    """Bits 31:30 of their addresses change nothing."""
    instance = Instance(NVFP4)
    instance.mma.sfa, instance.mma.sfb = SFA | 1 << 31, SFB | 1 << 30
    instance.check()


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (with_(NVFP4, n=64), {"a": Descriptor(0, 16, 2048, "128B")}),
        (with_(NVFP4, n=64), {"b": Descriptor(32768, 16, 2048, "128B")}),
        (NVFP4, {"a": Descriptor(0, 16, 1024, "64B")}),
        (NVFP4, {"a": Descriptor(32, 16, 1024, "128B")}),
        (with_(F16, swizzles=("none", "none")), {"a": Descriptor(0, 256, 384, "none")}),
        (NVFP4, {"sfa": SFA + 4}),
        (with_(NVFP4, n=64), {"sfb": SFB + 2}),
        (BLOCK32, {"idesc": with_(BLOCK32, ids=(2, 0)).idesc}),
        (MXFP8, {"idesc": with_(MXFP8, ids=(0, 3)).idesc}),
        (NVFP4, {"idesc": with_(NVFP4, scale="ue8m0").idesc}),
        (F16, {"idesc": with_(F16, negate=(True, False)).idesc}),
        (NVFP4, {"accumulate": False}),
    ],
    ids=name,
)
def test_wrong_operands_give_wrong_numbers(problem: Problem, changes: dict[str, object]) -> None:
    """Strides, swizzles, scale factors and descriptors that exist but are not those of the data."""
    instance = Instance(problem)
    if problem.scale:  # the words that are read by mistake agree in all quarters
        instance.tensor[:, 32:, SFA:] = np.tile(instance.tensor[:, :32, SFA:], (1, 3, 1))
    want = instance.expected()
    np.testing.assert_array_equal(instance.run(), want)
    instance.run.mmas = [instance.mma.with_(**changes)]
    assert (instance.run() != want).any()


@pytest.mark.parametrize("use", ["use", "lastuse"])
def test_a_collector_buffer_that_does_not_hold_a(use: str) -> None:
    """Reuse needs a fill with the same A directly before."""
    instance = Instance(with_(F16, accumulate=False))
    reuse = instance.mma.with_(form=f"kind::f16.collector::a::{use}")
    instance.run.mmas = [reuse]
    assert "reuses A from the collector buffer" in str(fault(instance))
    fill = instance.mma.with_(form="kind::f16.collector::a::fill")
    for between in (
        fill.with_(a=Descriptor(1024, 16, 1024, "128B")),
        instance.mma,
        instance.mma.with_(form="kind::f16.collector::a::lastuse"),
    ):
        instance.run.mmas = [fill, between, reuse]
        with pytest.raises(sim.SimulationError, match="reuses A") as caught:
            instance.run()
        assert caught.value.line == instance.run.line(2)


def test_reading_d_before_the_commit_has_arrived() -> None:
    """tcgen05.ld without a wait races with the operation, which the CTA may not even outlive."""
    instance = Instance(F16)
    text = instance.run.text()
    wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [rb], 0; @!p bra WAIT;"
    assert wait in text
    instance.run.text = lambda: text.replace(wait, "")  # type: ignore[method-assign]
    kinds = set()
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            instance.run(seed)
        kinds.add(caught.value.kind)
    assert "race" in kinds and kinds <= {"race", "exit"}


def test_two_warps_that_update_one_d() -> None:
    """Operations of two warps are ordered by nothing."""
    instance = Instance(F16)
    instance.run.mmas = [instance.mma, instance.mma]
    text = instance.run.text()
    head, tail = text[: text.rindex("@lead tcgen05.mma")], text[text.rindex("@lead tcgen05.mma") :]
    text = head + tail.replace("@lead tcgen05.mma", "@other tcgen05.mma")
    text = text.replace(".reg .pred p,", ".reg .pred other, p,")
    text = text.replace("setp.eq.u32 first,", "setp.eq.u32 other, t, 32; setp.eq.u32 first,", 1)
    instance.run.text = lambda: text  # type: ignore[method-assign]
    kinds = set()
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            instance.run(seed)
        kinds.add(caught.value.kind)
    assert "race" in kinds and kinds <= {"race", "exit"}


def test_many_lanes_are_warned_of() -> None:
    """Each lane that executes the instruction starts an operation of its own."""
    instance = Instance(with_(F16, accumulate=False))
    text = instance.run.text().replace("@lead tcgen05.mma", "@first tcgen05.mma")
    instance.run.text = lambda: text  # type: ignore[method-assign]
    instance.check()
    assert any("32 lanes" in w for w in instance.run.report.warnings)


@pytest.mark.parametrize(
    ("instruction", "target", "version", "text"),
    [
        (
            "kind::mxf4nvf4.block_scale.block16 [d], da, db, i, [sa], [sb], acc",
            "100f",
            "8.7",
            "8.8",
        ),
        (
            "kind::mxf4nvf4.block_scale.scale_vec::4X [d], da, db, i, [sa], [sb], acc",
            "100f",
            "8.8",
            "does not exist on sm_100f",
        ),
        ("kind::i8 [d], da, db, i, acc", "103a", "8.8", "does not exist on sm_103a"),
        ("kind::i8 [d], da, db, i, acc", "100f", "8.8", "does not exist on sm_100f"),
        ("kind::f8f6f4 [d], da, db, i, acc, 1", "100a", "8.8", "register acc is .pred"),
        ("kind::f16 [d], da, db, i, acc, i", "100a", "8.8", "combination of modifiers"),
        ("kind::f16 [d], da, db, i, {m0, m1}, acc", "100a", "8.8", "combination of modifiers"),
        ("kind::mxf4.block_scale.block16 [d], da, db, i, [sa], [sb], acc", "100a", "8.8", "no row"),
        (
            "kind::mxf4.block_scale.block32 [d], [ta], db, i, [sa], [sb], acc",
            "100a",
            "8.8",
            "expected a register",
        ),
    ],
)
def test_forms_that_do_not_exist(instruction: str, target: str, version: str, text: str) -> None:
    """Versions, targets and operands as ptxas 12.9 has them."""
    instance = Instance(F16)
    body = instance.run.text()
    line = body.split("\n")[instance.run.line() - 1]
    body = body.replace(line, f"@lead tcgen05.mma.cta_group::1.{instruction};")
    body = body.replace("sm_100a", f"sm_{target}").replace("version 8.8", f"version {version}")
    with pytest.raises(ValueError, match=text) as caught:
        sim.Machine(target).load(body)
    assert f"line {instance.run.line()}" in str(caught.value)
