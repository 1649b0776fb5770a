"""Kernels that use tensor memory: their beginning and end, the registers of tcgen05.ld and st."""

SHARED = (
    ".shared .align 1024 .b8 smem[16384]; .shared .align 8 .b64 bar; .shared .align 4 .b32 slot;"
)

# Registers per thread of .x1, lanes, columns of .x1, largest repetition (PTX ISA 9.7.16.8.1).
SHAPES = {
    "32x32b": (1, 32, 1, 128),
    "16x64b": (1, 16, 2, 128),
    "16x128b": (2, 16, 4, 64),
    "16x256b": (4, 16, 8, 32),
    "16x32bx2": (1, 16, 1, 128),
}


def holder(shape: str, lane: int, column: int) -> tuple[int, int]:
    """Thread and register that hold the word at (lane, column) of a load or store."""
    row, upper = lane % 8, lane // 8
    if shape == "16x64b":
        return 4 * row + 2 * (column % 2) + upper, column // 2
    if shape == "16x128b":
        return 4 * row + column % 4, 2 * (column // 4) + upper
    if shape == "16x256b":
        return 4 * row + column % 8 // 2, 4 * (column // 8) + 2 * upper + column % 2
    return lane, column


# Every legal pair of shape and repetition.
REPETITIONS = [
    (shape, 1 << k) for shape, (_, _, _, most) in SHAPES.items() for k in range(most.bit_length())
]


def with_tensor_memory(
    body: str, columns: int = 32, group: int = 1, release: str = "bar.sync 0;"
) -> str:
    """A body for `run` in which warp 0 allocates columns, and releases them after `release`.

    In it r0 is the thread, r1 the warp, r2 the tensor address, r3 the address of `smem`, r4 that
    of `bar`. The body's first line is the second one.
    """
    cluster = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else ""
    return (
        f"{SHARED} .reg .pred first; mov.u32 r0, %tid.x; shr.u32 r1, r0, 5; mov.u32 r3, smem; "
        f"mov.u32 r4, bar; mov.u32 r5, slot; setp.eq.u32 first, r1, 0; {cluster}"
        f"@first tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [r5], {columns}; "
        f"@first tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned; "
        f"{cluster or 'bar.sync 0;'} ld.shared.u32 r2, [r5];\n{body}\n"
        f"{release} setp.eq.u32 first, r1, 0; "
        f"@first tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 r2, {columns};"
        f"{cluster}"
    )
