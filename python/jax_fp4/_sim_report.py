"""What the PTX machine is told to watch, and what it tells of a launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from jax_fp4._sim_costs import Costs

# Format of struct.pack for a parameter type; pointers are u64 or b64.
PACK = {
    "b8": "B", "u8": "B", "s8": "b", "b16": "H", "u16": "H", "s16": "h", "b32": "I", "u32": "I",
    "s32": "i", "b64": "Q", "u64": "Q", "s64": "q", "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip


@dataclass(frozen=True)
class Checks:
    """What is watched besides bounds, alignment, divergence and deadlock, which always are.

    Attributes:
        races: accesses to shared memory that no barrier or atomic orders.
        uninitialized: uses of registers that nothing has written, or that were computed from such
            ones, and reads of such memory.
        strict: what the PTX ISA asks for and kernels of others leave out: tensor memory passes from
            warp to warp by `tcgen05.fence` pairs, memory from lane to lane of a warp by
            `bar.warp.sync`, bulk stores are waited for before a CTA exits, and
            `mbarrier.complete_tx` orders nothing (docs/simulator.md, rules H8, H10 and H15,
            assumptions S35 and S51).
    """

    races: bool = True
    uninitialized: bool = True
    strict: bool = False


@dataclass(frozen=True)
class Report:
    """What a launch did.

    Attributes:
        seed: of the schedule.
        instructions: executed by warps.
        lane_instructions: executed by lanes whose guard held.
        by_class: instructions of warps by class: integer, floating, convert, memory, control, warp.
        bytes_read: by memory space.
        bytes_written: by memory space.
        by_line: instructions of warps by PTX line.
        trace: hash of the schedule; equal seeds give equal traces.
        warnings: what is probably harmless, such as racing writes of one value.
        costs: where the machine was asked for them.
    """

    seed: int
    instructions: int
    lane_instructions: int
    by_class: dict[str, int]
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    by_line: dict[int, int] = field(repr=False)
    trace: int
    warnings: list[str]
    costs: Costs | None = None


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: name, PTX type, place in the parameter block."""

    name: str
    type: str
    offset: int
    bytes: int
    is_array: bool
