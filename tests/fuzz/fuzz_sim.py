"""Fuzzes the PTX machine with atheris: no text and no program may crash it.

    python tests/fuzz/fuzz_sim.py parser -max_total_time=600      changed text, loaded
    python tests/fuzz/fuzz_sim.py machine -max_total_time=600     changed kernels, loaded and run

`make test-fuzz` runs both under AddressSanitizer. Input bytes are read as decisions: which kernel,
which lines of it are dropped, repeated, exchanged, or get a word of another line; so nearly every
input is a program and not noise. Anything but the exceptions that jax_fp4.sim documents is a
finding.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from jax_fp4 import sim
from support import nvfp4_tile, ptx_kernel

BODIES = [
    "mov.u32 r0, %tid.x; mov.u32 r1, s; shl.b32 r2, r0, 2; add.u32 r1, r1, r2;\n"
    "st.shared.u32 [r1], r0;\nbar.sync 0;\nld.shared.u32 r3, [r1];\n"
    "shfl.sync.bfly.b32 r4, r3, 1, 31, -1;\nvote.sync.ballot.b32 r5, p, -1;\n",
    "mov.u32 r0, %tid.x;\nL: add.u32 r0, r0, 1;\nsetp.lt.u32 p, r0, 40;\n@p bra L;\n"
    "cvt.rn.f32.u32 f0, r0;\nfma.rn.f32 f1, f0, f0, f0;\ncvt.rn.bf16x2.f32 r1, f0, f1;\n"
    "prmt.b32 r2, r1, r0, 0x5410;\nmul.wide.u32 a0, r0, r2;\n",
    "mov.u32 r1, bar; mov.u32 r0, %tid.x; setp.eq.u32 p, r0, 0;\n"
    "@p mbarrier.init.shared.b64 [r1], 32;\nbar.sync 0;\nmbarrier.arrive.shared.b64 a0, [r1];\n"
    "W: mbarrier.try_wait.shared.b64 q, [r1], a0;\n@!q bra W;\nfence.proxy.async;\n",
]
MODULE = ".shared .align 16 .b8 s[1024]; .shared .align 8 .b64 bar;"
TEXTS = [ptx_kernel.text_of(body, module=MODULE) for body in BODIES]
TEXTS += [nvfp4_tile.kernel(group, 1) for group in (1, 2)]
NUMBERS = ["0", "-1", "1", "4294967295", "0x8000000000000000", "31"]
WORDS = sorted({word for text in TEXTS for word in text.split()})


def changed(data: atheris.FuzzedDataProvider) -> str:
    """A kernel with up to eight changes."""
    lines = data.PickValueInList(TEXTS).splitlines()
    for _ in range(data.ConsumeIntInRange(0, 8)):
        at = data.ConsumeIntInRange(0, len(lines) - 1)
        other = data.ConsumeIntInRange(0, len(lines) - 1)
        how = data.ConsumeIntInRange(0, 5)
        words = lines[at].split(" ")
        if how == 0:
            lines[at] = ""
        elif how == 1:
            lines.insert(at, lines[other])
        elif how == 2:
            lines[at], lines[other] = lines[other], lines[at]
        elif how == 3:
            words[data.ConsumeIntInRange(0, len(words) - 1)] = data.PickValueInList(WORDS)
            lines[at] = " ".join(words)
        elif how == 4:
            number = data.PickValueInList(
                ["0", "-1", "1", "4294967295", "0x8000000000000000", "31"]
            )
            words[-1] = number + ";"
            lines[at] = " ".join(words)
        else:
            place = data.ConsumeIntInRange(0, len(lines[at]))
            noise = data.ConsumeUnicodeNoSurrogates(4)
            lines[at] = lines[at][:place] + noise + lines[at][place:]
    return "\n".join(lines)


def parse(data: bytes) -> None:
    """Loads changed text."""
    try:
        sim.Machine("100a").load(changed(atheris.FuzzedDataProvider(data)))
    except sim.PtxError:
        pass


def execute(data: bytes) -> None:
    """Loads and runs a changed kernel, within few instructions."""
    provider = atheris.FuzzedDataProvider(data)
    seed = provider.ConsumeIntInRange(0, 99)
    machine = sim.Machine("100a", seed=seed, checks=sim.Checks(strict=provider.ConsumeBool()))
    codes = np.zeros((128, nvfp4_tile.BLOCK), np.uint8)
    scales = np.full((128, nvfp4_tile.BLOCK // 16), 0x38, np.uint8)
    try:
        module = machine.load(changed(provider))
        for entry in module.entries:
            if entry == "tile":
                nvfp4_tile.launch(
                    machine, module, (codes, codes), (scales, scales), max_instructions=20000
                )
            else:
                module.launch(entry, 2, 64, max_instructions=20000)
    except (sim.PtxError, sim.SimulationError, ValueError):
        pass


if __name__ == "__main__":
    target = {"parser": parse, "machine": execute}[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
