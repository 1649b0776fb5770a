"""Runs a hand-written kernel body with registers and parameters already declared."""

from typing import Any

from jax_fp4 import sim

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = (
    ".reg .pred p, q; .reg .b16 h<4>; .reg .b32 r<16>; .reg .b64 a<8>; "
    ".reg .b128 big; .reg .f32 f<4>;"
)


def text_of(body: str, parameters: str = "", module: str = "") -> str:
    """PTX of an entry `k`; the body starts on its third line of its own (see `first_line`)."""
    return f"{HEADER}{module}\n.visible .entry k({parameters})\n{{ {REGISTERS}\n{body}\nret;\n}}\n"


# The PTX line of the body's first line, where `module` is empty.
FIRST_LINE = 7


def run(
    body: str,
    *args: Any,
    block: Any = 32,
    grid: Any = 1,
    cluster: Any = 1,
    smem: int = 0,
    parameters: str = "",
    module: str = "",
    machine: sim.Machine | None = None,
    **options: Any,
) -> sim.Report:
    """Loads and launches the kernel on a machine of its own, or on the given one."""
    machine = machine or sim.Machine("100a")
    loaded = machine.load(text_of(body, parameters, module))
    return loaded.launch("k", grid, block, cluster, smem, args, **options)
