"""Tensor memory's allocation: who may allocate what and when, and what is reported otherwise."""

import numpy as np
import pytest

from jax_fp4 import sim
from support.ptx_kernel import FIRST_LINE, run
from support.tensor_memory import SHARED, with_tensor_memory

ALLOC = "tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [{at}], {n};"
DEALLOC = "tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 {at}, {n};"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned;"
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
BEGIN = f"{SHARED} mov.u32 r0, %tid.x; shr.u32 r1, r0, 5; mov.u32 r3, smem;"


def alloc(at: str, n: int | str, group: int = 1) -> str:
    return ALLOC.format(at=at, n=n, g=group)


def dealloc(at: str, n: int | str, group: int = 1) -> str:
    return DEALLOC.format(at=at, n=n, g=group)


@pytest.mark.parametrize("space", [".shared::cta", ""])
@pytest.mark.parametrize("columns", [32, 64, 128, 256, 512])
def test_allocations_lie_apart_and_are_aligned(columns: int, space: str) -> None:
    """All of tensor memory can be had in parts of one size; the lowest address comes first."""
    count = 512 // columns
    out = np.zeros(count, np.uint32)
    body = BEGIN + " ld.param.u64 a0, [y]; cvt.u64.u32 a1, r3; cvta.shared.u64 a1, a1;"
    at = "r3" if space else "a1"
    allocation = alloc(at, columns).replace(".shared::cta", space)
    for k in range(count):
        body += f"{allocation} ld.shared.u32 r5, [r3]; st.global.u32 [a0+{4 * k}], r5;\n"
    for k in range(count):
        body += f"ld.global.u32 r5, [a0+{4 * k}]; {dealloc('r5', columns)}\n"
    run(body + RELINQUISH.format(g=1), out, parameters=".param .u64 y")
    np.testing.assert_array_equal(out, np.arange(count) * columns)


def test_an_allocation_waits_for_free_columns() -> None:
    """Two warps take turns with all columns; one waits until the other has released them."""
    out = np.zeros(64, np.uint32)
    body = (
        BEGIN + " ld.param.u64 a0, [y]; mad.wide.u32 a0, r0, 4, a0; shl.b32 r6, r1, 2; "
        f"add.u32 r6, r6, r3; mov.u32 r7, 0;\nL: {alloc('r6', 512)} ld.shared.u32 r2, [r6]; "
        "shl.b32 r8, r1, 21; add.u32 r8, r8, r2; tcgen05.st.sync.aligned.32x32b.x1.b32 [r8], {r0};"
        "tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {r9}, [r8]; "
        f"tcgen05.wait::ld.sync.aligned;\n{dealloc('r2', 512)} add.u32 r7, r7, 1; "
        "setp.lt.u32 p, r7, 5; @p bra L; st.global.u32 [a0], r9;"
    )
    for seed in range(20):
        run(body, out, parameters=".param .u64 y", block=64, machine=sim.Machine("100a", seed))
        np.testing.assert_array_equal(out, np.arange(64))


def test_pairs_wait_for_free_columns() -> None:
    """Two warps of each CTA of a pair take turns with all columns."""
    body = (
        f"{BEGIN} shl.b32 r6, r1, 2; add.u32 r6, r6, r3; mov.u32 r7, 0;\nL: "
        f"{alloc('r6', 512, 2)} ld.shared.u32 r2, [r6]; {dealloc('r2', 512, 2)} "
        "add.u32 r7, r7, 1; setp.lt.u32 p, r7, 3; @p bra L;"
    )
    for seed in range(20):
        run(body, grid=2, cluster=2, block=64, machine=sim.Machine("100a", seed))


@pytest.mark.parametrize("columns", [32, 512])
def test_both_ctas_of_a_pair_get_the_same_columns(columns: int) -> None:
    """Whoever comes first waits; every pair of a cluster for itself."""
    out = np.full(4, 99, np.uint32)
    body = with_tensor_memory(
        "ld.param.u64 a0, [y]; mov.u32 r6, %ctaid.x; mad.wide.u32 a0, r6, 4, a0; "
        "setp.eq.u32 p, r0, 0; @p st.global.u32 [a0], r2;",
        columns,
        group=2,
    )
    for seed in range(20):
        out[:] = 99
        run(
            body,
            out,
            parameters=".param .u64 y",
            grid=4,
            cluster=4,
            block=64,
            machine=sim.Machine("100a", seed),
        )
        np.testing.assert_array_equal(out, 0)


R2 = "ld.shared.u32 r2, [r3];"
# (part of the message, number of the line with the fault, body): one warp, one CTA.
PLANTED = {
    "not a power of two": ("48 columns; their number", 1, f"mov.u32 r5, 48;\n{alloc('r3', 'r5')}"),
    "too few": ("16 columns; their number", 1, f"mov.u32 r5, 16;\n{alloc('r3', 'r5')}"),
    "too many": ("1024 columns; their number", 1, f"mov.u32 r5, 1024;\n{alloc('r3', 'r5')}"),
    "larger than before": (
        "allocates 128 columns after 64 columns",
        1,
        f"{alloc('r3', 64)}\n{alloc('r3', 128)}",
    ),
    "after relinquish": (
        "given up the right to, at PTX line 7",
        1,
        f"{RELINQUISH.format(g=1)}\n{alloc('r3', 32)}",
    ),
    "leak": ("has not released 64 columns", 1, f"\n{alloc('r3', 64)}"),
    "released twice": (
        "is not allocated; it was released at PTX line 8",
        2,
        f"{alloc('r3', 32)} {R2}\n{dealloc('r2', 32)}\n{dealloc('r2', 32)}",
    ),
    "released with another size": (
        "is not what was allocated: address 0 with 64 columns at PTX line 7",
        1,
        f"{alloc('r3', 64)} {R2}\n{dealloc('r2', 32)}",
    ),
    "released in the middle": (
        "address 0x20 with 64 columns is not what was allocated",
        1,
        f"{alloc('r3', 64)} {R2} add.u32 r2, r2, 32;\n{dealloc('r2', 64)}",
    ),
    "released with lanes": (
        "address 0x200000 with 64 columns is not what",
        1,
        f"{alloc('r3', 64)} {R2} add.u32 r2, r2, 0x200000;\n{dealloc('r2', 64)}",
    ),
    "never allocated": ("is not allocated", 1, f"mov.u32 r2, 32;\n{dealloc('r2', 32)}"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_broken_rules_are_reported(name: str) -> None:
    """Each rule of allocation, broken once: kind and line."""
    message, line, body = PLANTED[name]
    with pytest.raises(sim.SimulationError) as caught:
        run(f"{BEGIN} {body}")
    assert (caught.value.kind, caught.value.line) == ("tensor-memory", FIRST_LINE + line)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message", "body"),
    [
        (
            "argument",
            "the number of columns is the same",
            f"shl.b32 r5, r0, 5;\n{alloc('r3', 'r5')}",
        ),
        (
            "argument",
            "the shared address is the same",
            f"mad.lo.u32 r5, r0, 4, r3;\n{alloc('r5', 32)}",
        ),
        (
            "out-of-bounds",
            "is not one of shared",
            "ld.param.u64 a0, [y];\n" + alloc("a0", 32).replace(".shared::cta", ""),
        ),
        ("divergence", "would have to take part", f"setp.lt.u32 p, r0, 9;\n@p {alloc('r3', 32)}"),
        (
            "deadlock",
            "columns of tensor memory to be free",
            f"{alloc('r3', 512)}\n{alloc('r3', 32)}",
        ),
    ],
)
def test_misuse_of_alloc(kind: str, message: str, body: str) -> None:
    """Operands that differ between lanes, lanes that are missing, a wait that nobody ends."""
    with pytest.raises(sim.SimulationError) as caught:
        run(f"{BEGIN} {body}", np.zeros(8, np.uint32), parameters=".param .u64 y")
    assert (caught.value.kind, caught.value.line) == (kind, FIRST_LINE + 1)
    assert message in str(caught.value)


RANK = "mov.u32 r6, %cluster_ctarank; setp.eq.u32 p, r6, 0;"
# Of the two CTAs of a pair, each one warp: (kind, message, line, body).
PAIRS = {
    "peer has exited": (
        "tensor-memory",
        "the other CTA of the pair",
        1,
        f"@!p exit;\n{alloc('r3', 32, 2)}",
    ),
    "different sizes": (
        "tensor-memory",
        "both CTAs of a pair name the same columns",
        1,
        f"selp.u32 r5, 32, 64, p;\n{alloc('r3', 'r5', 2)}",
    ),
    "peer does not release": (
        "tensor-memory",
        "has not released 32 columns",
        1,
        f"\n{alloc('r3', 32, 2)} {R2} @!p exit;\n{dealloc('r2', 32, 2)}",
    ),
    "peer waits elsewhere": (
        "deadlock",
        "waits for the same instruction in the other CTA of its pair",
        1,
        f"@!p bra W;\n{alloc('r3', 32, 2)}\nW: {CLUSTER}",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_broken_rules_of_pairs_are_reported(name: str) -> None:
    """Both CTAs of a pair must execute alloc and dealloc, with the same columns."""
    kind, message, line, body = PAIRS[name]
    for seed in range(10):
        with pytest.raises(sim.SimulationError) as caught:
            run(f"{BEGIN} {RANK} {body}", grid=2, cluster=2, machine=sim.Machine("100a", seed))
        assert caught.value.kind == kind and message in str(caught.value), str(caught.value)
        lines = {FIRST_LINE + line} if kind != "deadlock" else {FIRST_LINE + 1, FIRST_LINE + 2}
        assert caught.value.line in lines


def test_one_kernel_has_one_cta_group() -> None:
    """Two groups do not load, and the message has both lines; pairs need clusters of even size."""
    with pytest.raises(sim.PtxError, match=r"line 8: .*one \.cta_group; it is 1 at line 7: tcg"):
        run(f"{alloc('r3', 32)}\n{RELINQUISH.format(g=2)}")
    with pytest.raises(ValueError, match=r"uses \.cta_group::2, which needs clusters with an even"):
        run(BEGIN + alloc("r3", 32, 2))


def test_the_address_is_read_after_a_barrier() -> None:
    """Another warp that reads the address without one races with the allocation."""
    body = with_tensor_memory("nop_line: mov.u32 r6, r2;").replace("bar.sync 0; ld", "ld", 1)
    kinds = set()
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            run(body, block=64, machine=sim.Machine("100a", seed))
        kinds.add(caught.value.kind)
        assert caught.value.line == FIRST_LINE
    assert kinds <= {"race", "uninitialized-memory"} and "race" in kinds


def test_a_known_address_needs_a_barrier_too() -> None:
    """A warp that takes address 0 for granted is reported where it uses tensor memory too early."""
    body = (
        BEGIN + f" setp.ne.u32 p, r1, 0; @p bra W; {alloc('r3', 32)} bra M;\n"
        "W: mov.u32 r2, 0x200000;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [r2], {r0}; "
        f"tcgen05.wait::st.sync.aligned;\nM: bar.sync 0; @p exit; {R2} {dealloc('r2', 32)}"
    )
    for seed in range(20):
        with pytest.raises(sim.SimulationError) as caught:
            run(body, block=64, machine=sim.Machine("100a", seed))
        assert caught.value.kind in {"race", "out-of-bounds"}
        assert caught.value.line == FIRST_LINE + 2
