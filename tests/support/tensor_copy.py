"""Kernels with one tensor copy: a box to shared memory and that to an array, or the way back."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_fp4 import sim
from oracles.tensor_box import Tensor

# The first dynamic byte of shared memory: after the reserved KiB and the mbarrier, aligned to 1024.
START = 2048

HEADER = """.version 8.8
.target sm_{target}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 words,
  .param .align 4 .b8 coordinates[20], .param .u32 bytes, .param .u32 offset)
{{ .reg .pred p, q; .reg .b32 r<16>, c<5>; .reg .b64 a<8>; .reg .b16 h<4>;
.shared .align 8 .b64 bar; mov.u32 r0, %tid.x; setp.eq.u32 p, r0, 0; mov.u32 r1, bar;
mov.u32 r2, dynamic; ld.param.u32 r3, [offset]; add.u32 r3, r3, r2;
ld.param.u32 r4, [bytes]; ld.param.u64 a0, [out]; ld.param.u32 r5, [words];
{coordinates}
"""
FIRST_LINE = HEADER.count("\n") + 1  # the PTX line of a body's first line
# Shared memory from r2 on, r5 words of it, to a0; or the way back.
COPY_OUT = """mov.u32 r6, r0;
L: setp.ge.u32 q, r6, r5; @q bra E; mad.lo.u32 r7, r6, 4, r2; ld.shared.u32 r8, [r7];
mad.wide.u32 a1, r6, 4, a0; st.global.u32 [a1], r8; mov.u32 r9, %ntid.x; add.u32 r6, r6, r9; bra L;
E:
"""
COPY_IN = """mov.u32 r6, r0;
L: setp.ge.u32 q, r6, r5; @q bra E; mad.wide.u32 a1, r6, 4, a0; ld.global.u32 r8, [a1];
mad.lo.u32 r7, r6, 4, r2; st.shared.u32 [r7], r8; mov.u32 r9, %ntid.x; add.u32 r6, r6, r9; bra L;
E:
"""
INIT = "@p mbarrier.init.shared.b64 [r1], 1; bar.sync 0;\n"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 q, [r1], 0; @!q bra W;\n"


def text_of(body: str, target: str = "100a") -> str:
    loads = " ".join(f"ld.param.u32 c{d}, [coordinates+{4 * d}];" for d in range(5))
    return HEADER.format(target=target, coordinates=loads) + body + "ret;\n}\n"


def encoded(machine: sim.Machine, tensor: Tensor, memory: np.ndarray) -> bytes:
    """The tensor map of a tensor that starts at the array's first byte."""
    return sim.tensor_map(
        machine.address(memory), tensor.dims, tensor.strides, tensor.box, tensor.data_type,
        tensor.swizzle, element_strides=tensor.element_strides or None, oob_fill=tensor.oob_fill,
    )  # fmt: skip


def launch(
    machine: sim.Machine,
    body: str,
    tensor_map: bytes,
    out: np.ndarray,
    coordinates: Sequence[int] = (),
    bytes_expected: int = 0,
    offset: int = 0,
    smem: int | None = None,
    target: str = "100a",
    block: int = 32,
    cluster: int = 1,
    **options: Any,
) -> sim.Report:
    """Runs a body in one cluster; `out` is as long as the dynamic shared memory of its CTAs."""
    module = machine.load(text_of(body, target))
    padded = np.zeros(5, np.int32)
    padded[: len(coordinates)] = coordinates
    smem = out.nbytes // cluster if smem is None else smem
    words = out.nbytes // cluster // 4
    args = [tensor_map, out, words, padded.tobytes(), bytes_expected, offset]
    return module.launch("k", cluster, block, cluster, smem, args, **options)


def load_body(rank: int, instruction: str = "", list_of: str = "") -> str:
    """One thread asks for a box, all threads wait and copy shared memory to `out`."""
    name = (
        instruction
        or f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    )
    coordinates = list_of or ", ".join(f"c{d}" for d in range(rank))
    return (
        INIT + "@!p bra W;\nmbarrier.arrive.expect_tx.shared.b64 _, [r1], r4;\n"
        f"{name} [r3], [map, {{{coordinates}}}], [r1];\n" + WAIT + COPY_OUT
    )


def store_body(rank: int, instruction: str = "", list_of: str = "") -> str:
    """All threads copy `out` to shared memory, one thread stores a box of it and waits for that."""
    name = instruction or f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    coordinates = list_of or ", ".join(f"c{d}" for d in range(rank))
    return (
        COPY_IN + "fence.proxy.async.shared::cta; bar.sync 0; @!p bra W;\n"
        f"{name} [map, {{{coordinates}}}], [r3];\n"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\nW:\n"
    )
