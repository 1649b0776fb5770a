"""How fast the PTX machine runs: millions of warp instructions per second of processor time.

    python bench/sim_speed.py [--checks off] [--repeat 3] [name ...]

Kernels: `arithmetic` (integer and f32 only), `quantize` (a tile of f32 goes through shared memory:
half of the instructions are ld.shared and st.shared of 8 to 128 bits and ldmatrix), `scattered`
(the same accesses by lanes far apart, under a guard), `copy` (global memory), `mma`
(ldmatrix and block-scaled mma.sync), `shipped` (our quantizer: rows and columns of a bf16 matrix of
2048 x 1024 to NVFP4, through shared memory).
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_fp4 import sim

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import device_kernels
from support.cpu_quantize import Options

HEADER = ".version 8.8\n.target sm_120a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred p, more; .reg .b16 h<8>; .reg .b32 r<64>, n, tid, lane; .reg .f32 f<16>; "
    ".reg .b64 a<8>; .shared .align 128 .b8 s[20480];"
)
WARPS = 8


def kernel(before: str, body: str, loops: int, after: str = "") -> str:
    """An entry `k(x, y)` that runs the body `loops` times."""
    return f"""{HEADER}.visible .entry k(.param .u64 x, .param .u64 y) {{ {REGISTERS}
 mov.u32 tid, %tid.x; and.b32 lane, tid, 31; ld.param.u64 a0, [x]; ld.param.u64 a1, [y];
 {before}
 mov.u32 n, {loops};
loop:
 {body}
 sub.u32 n, n, 1; setp.ne.u32 more, n, 0; @more bra loop;
 {after}
 ret; }}""".replace(";", ";\n")


def arithmetic() -> tuple[str, dict]:
    """Integer and f32 operations on registers."""
    before = "".join(f"add.u32 r{i}, tid, {i}; cvt.rn.f32.u32 f{i}, r{i};" for i in range(8))
    step = (
        "add.u32 r{0}, r{0}, r{1}; xor.b32 r{1}, r{1}, r{0}; shl.b32 r{2}, r{1}, 3; "
        "mad.lo.u32 r{2}, r{0}, 5, r{2}; mul.rn.f32 f{0}, f{1}, f{2}; "
        "add.rn.f32 f{1}, f{0}, f{3}; fma.rn.f32 f{2}, f{0}, f{1}, f{3};"
    )
    body = "".join(step.format(*((i + k) % 8 for k in range(4))) for i in range(8))
    return kernel(before, body, 4000), {}


def quantize() -> tuple[str, dict]:
    """A 32 x 32 tile of f32 for each warp, its neighbour's columns, codes of 8 and 16 bits."""
    before = (
        # r0: vectors of the own tile's rows of 36 words; r1: a column of the next warp's tile.
        "shr.u32 r4, tid, 5; mul.lo.u32 r5, r4, 2304; mov.u32 r6, s; add.u32 r5, r5, r6; "
        "shr.u32 r7, lane, 3; and.b32 r8, lane, 7; mad.lo.u32 r0, r7, 144, r5; "
        "mad.lo.u32 r0, r8, 16, r0; add.u32 r9, r4, 1; and.b32 r9, r9, 7; "
        "mad.lo.u32 r1, r9, 2304, r6; and.b32 r10, lane, 15; mad.lo.u32 r1, r10, 144, r1; "
        "add.u32 r2, r5, lane; mad.lo.u32 r3, lane, 2, r5; mad.lo.u32 r11, lane, 16, r5;"
        "shr.u32 r12, lane, 4; mad.lo.u32 r12, r12, 16, r1; mad.lo.u32 r13, lane, 4, r5; "
        "cvt.rn.f32.u32 f0, tid; mov.f32 f1, 0f3F800000; mov.f32 f2, 0f40000000; mov.f32 f3, f0;"
    )
    store = "".join(
        f"st.shared.v4.f32 [r0+{i * 576}], {{f0, f1, f2, f3}}; add.rn.f32 f0, f0, f1; "
        for i in range(4)
    )
    load = "".join(
        f"ld.shared.f32 f{4 + i % 4}, [r1+{4 * i}]; abs.f32 f8, f{4 + i % 4}; "
        + ("max.f32 f9, f8, f1; " if i % 2 else "")
        for i in range(16)
    )
    codes = "".join(
        f"st.shared.u8 [r2+{32 * i}], r13; mul.rn.f32 f10, f4, f9; cvt.rzi.u32.f32 r20, f10; "
        f"ld.shared.u8 r21, [r2+{32 * i}]; st.shared.b16 [r3+{512 + 64 * i}], h0; "
        f"ld.shared.b16 h1, [r3+{512 + 64 * i}]; shl.b32 r22, r21, 4; or.b32 r23, r22, r21; "
        for i in range(8)
    )
    body = (
        f"{store} bar.sync 0; {load} bar.sync 0; cvt.u16.u32 h0, tid; {codes} bar.sync 0; "
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r30, r31, r32, r33}, [r12]; "
        "ld.shared.v2.b32 {r34, r35}, [r12+32]; xor.b32 r36, r30, r31; ld.shared.b32 r37, [r12];"
        "add.u32 r38, r37, r36; bar.sync 0;"
    )
    return kernel(before, body, 600), {}


def scattered() -> tuple[str, dict]:
    """Transposing byte stores, words at random places, half of the lanes guarded off."""
    before = (
        "shr.u32 r4, tid, 5; mov.u32 r6, s; mad.lo.u32 r0, lane, 264, r6; add.u32 r0, r0, r4; "
        "mul.lo.u32 r7, lane, 37; and.b32 r7, r7, 31; mad.lo.u32 r1, r7, 4, r6; "
        "and.b32 r8, lane, 1; setp.eq.u32 p, r8, 0; mad.lo.u32 r2, lane, 264, r6; "
        "mad.lo.u32 r2, r4, 32, r2;"
    )
    write = "".join(f"st.shared.u8 [r0+{8 * i}], lane; add.u32 r9, lane, {i};" for i in range(32))
    read = "".join(f"ld.shared.b64 a2, [r2+{8 * (i % 4)}]; add.u64 a3, a2, {i};" for i in range(16))
    half = "".join(f"@p ld.shared.b32 r10, [r1+{i * 4}]; @p add.u32 r11, r10, 1;" for i in range(8))
    return kernel(before, f"{write} bar.sync 0; {read} {half} bar.sync 0;", 400), {}


def copy() -> tuple[str, dict]:
    """Global memory to global memory, 16, 4 and 2 bytes a lane."""
    before = (
        "mad.wide.u32 a2, tid, 16, a0; mad.wide.u32 a3, tid, 16, a1; mad.wide.u32 a4, tid, 2, a0;"
    )
    body = "".join(
        f"ld.global.v4.b32 {{r0, r1, r2, r3}}, [a2+{i * 4096}]; add.u32 r0, r0, n; "
        f"st.global.v4.b32 [a3+{i * 4096}], {{r0, r1, r2, r3}}; ld.global.b16 h0, [a4+{i * 512}]; "
        f"add.u16 h1, h0, 1; st.global.b16 [a3+{i * 4096}], h1; ld.global.b32 r4, [a2];"
        for i in range(8)
    )
    return kernel(before, body, 400), {"bytes": 1 << 16}


def mma() -> tuple[str, dict]:
    """ldmatrix of A and B, then mma.sync of NVFP4."""
    before = (
        "mov.u32 r6, s; mad.lo.u32 r0, lane, 16, r6; mov.b32 r1, 0; mov.b32 r2, 0x38383838;"
        "mad.lo.u32 r3, tid, 16, r6; st.shared.v4.b32 [r3], {tid, lane, tid, lane}; bar.sync 0; "
        + "".join(f"mov.f32 f{i}, 0f00000000;" for i in range(16))
    )
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{r{0}, r{1}, r{2}, r{3}}}, [r0+{4}];"
    step = (
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
        ".f32.e2m1.e2m1.f32.ue4m3 {{f{0}, f{1}, f{2}, f{3}}}, {{r10, r11, r12, r13}}, "
        "{{r{4}, r{5}}}, {{f{0}, f{1}, f{2}, f{3}}}, r2, {{0, 0}}, r2, {{0, 0}};"
    )
    body = load.format(10, 11, 12, 13, 0) + load.format(14, 15, 16, 17, 512)
    body += "".join(
        step.format(*(4 * i + k for k in range(4)), 14 + 2 * (i % 2), 15 + 2 * (i % 2))
        for i in range(4)
    )
    return kernel(before, body, 300), {}


KERNELS: dict[str, Callable[[], tuple[str, dict]]] = {
    f.__name__: f for f in (arithmetic, quantize, scattered, copy, mma)
}


def launches(text: str, checks: sim.Checks, size: int, grid: int) -> Iterator[tuple[int, float]]:
    """Warp instructions and seconds of processor time, launch after launch."""
    module = sim.Machine("120a", checks=checks).load(text)
    x, y = np.ones(size // 4, np.uint32), np.zeros(size // 4, np.uint32)
    while True:
        start = time.process_time()
        report = module.launch("k", grid, 32 * WARPS, args=[x, y])
        yield report.instructions, time.process_time() - start


class Timed(sim.Machine):
    """Takes the processor time of launches."""

    seconds = 0.0

    def load(self, ptx: str) -> Any:
        """A module whose launches are timed."""
        module = super().load(ptx)
        launch = module.launch

        def timed(*args: Any, **options: Any) -> sim.Report:
            start = time.process_time()
            report = launch(*args, **options)
            self.seconds += time.process_time() - start
            return report

        module.launch = timed  # type: ignore[method-assign]
        return module


@dataclasses.dataclass
class TimedDevice(device_kernels.Device):
    """Its launches run on one machine."""

    timed: Timed = dataclasses.field(default_factory=lambda: Timed("100a"))

    def machine(self) -> sim.Machine:
        """The one that takes the time."""
        return self.timed


def shipped(checks: sim.Checks) -> Iterator[tuple[int, float]]:
    """Warp instructions and seconds of our quantizer, launch after launch."""
    x = np.random.default_rng(0).standard_normal((1, 2048, 1024)).astype(np.float32)
    x = (x.view(np.uint32) >> 16).astype(np.uint16)
    copies = [Options(format="NVFP4", tiled_layout=True, axis=axis) for axis in (1, 0)]
    while True:
        device = TimedDevice(timed=Timed("100a", checks=checks))
        device_kernels.quantize(device, x, *copies)
        yield device.reports[0][1].instructions, device.timed.seconds


def main() -> None:
    """Prints a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*KERNELS, "shipped"], metavar="name")
    parser.add_argument("--checks", choices=("on", "off"), default="on")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    on = options.checks == "on"
    for name in options.names:
        if name == "shipped":
            runs = shipped(sim.Checks(on, on))
        else:
            text, settings = KERNELS[name]()
            runs = launches(text, sim.Checks(on, on), settings.get("bytes", 4096), 4)
        best = max(n / seconds / 1e6 for n, seconds in (next(runs) for _ in range(options.repeat)))
        print(f"{name:12} {best:7.2f} million warp instructions/s, checks {options.checks}")


if __name__ == "__main__":
    main()
