"""Runs one PTX instruction on arrays of operands.

`evaluate("add.s32 {d0}, {s0}, {s1};", inputs, outputs)` makes a kernel in which thread i loads
element i of every input into a register, executes the instruction, and stores the results.
"""

from collections.abc import Sequence

import numpy as np

from jax_fp4 import sim

# Register type and memory type by the bits of an operand.
_REGISTERS = {8: "b8", 16: "b16", 32: "b32", 64: "b64"}
_DTYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def kernel_text(
    instruction: str, inputs: Sequence[int], outputs: Sequence[int], target: str, version: str
) -> str:
    """PTX of the kernel; operand widths in bits, 1 is a predicate."""
    parameters = [f".param .u64 pi{k}" for k in range(len(inputs))]
    parameters += [f".param .u64 po{k}" for k in range(len(outputs))] + [".param .u32 n"]
    lines = [f".version {version}", f".target {target}", ".address_size 64"]
    lines += [f".visible .entry k({', '.join(parameters)})", "{"]
    lines += [".reg .pred stop;", ".reg .b32 i, count, t, u;", ".reg .b64 at, base;"]
    for kind, widths in (("s", inputs), ("d", outputs)):
        for k, width in enumerate(widths):
            register = ".pred" if width == 1 else f".{_REGISTERS[width]}"
            lines.append(f".reg {register} {kind}{k};")
    lines += ["mov.u32 t, %ctaid.x;", "mov.u32 u, %ntid.x;", "mad.lo.u32 i, t, u, 0;"]
    lines += ["mov.u32 t, %tid.x;", "add.u32 i, i, t;", "ld.param.u32 count, [n];"]
    lines += ["setp.ge.u32 stop, i, count;", "@stop bra END;"]
    for k, width in enumerate(inputs):
        stored = max(width, 8) // 8
        lines.append(f"ld.param.u64 base, [pi{k}]; mad.wide.u32 at, i, {stored}, base;")
        if width == 1:
            lines.append(f"ld.global.u8 t, [at]; setp.ne.u32 s{k}, t, 0;")
        else:
            lines.append(f"ld.global.{_REGISTERS[width]} s{k}, [at];")
    operands = {f"s{k}": f"s{k}" for k in range(len(inputs))}
    operands |= {f"d{k}": f"d{k}" for k in range(len(outputs))}
    for name, text in operands.items():
        instruction = instruction.replace("{" + name + "}", text)
    lines.append(instruction)
    for k, width in enumerate(outputs):
        stored = max(width, 8) // 8
        lines.append(f"ld.param.u64 base, [po{k}]; mad.wide.u32 at, i, {stored}, base;")
        if width == 1:
            lines.append(f"selp.u32 t, 1, 0, d{k}; st.global.u8 [at], t;")
        else:
            lines.append(f"st.global.{_REGISTERS[width]} [at], d{k};")
    return "\n".join([*lines, "END: ret;", "}"])


def evaluate(
    instruction: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[int],
    *,
    predicates: Sequence[int] = (),
    target: str = "sm_100a",
    version: str = "8.8",
) -> list[np.ndarray]:
    """Results of the instruction as unsigned arrays, one for each output.

    Args:
        instruction: with {s0}, {s1}, ... for sources and {d0}, ... for destinations.
        inputs: arrays of one length; their item size is the operand's width.
        outputs: width of each destination in bits; 1 is a predicate.
        predicates: numbers of inputs that are predicates (uint8, 0 or 1).
        target: of the module; also the machine.
        version: of the PTX ISA.
    """
    widths = [1 if k in predicates else x.dtype.itemsize * 8 for k, x in enumerate(inputs)]
    text = kernel_text(instruction, widths, outputs, target, version)
    n = len(inputs[0])
    results = [np.zeros(n, _DTYPES[max(width, 8)]) for width in outputs]
    machine = sim.Machine(target.removeprefix("sm_"))
    module = machine.load(text)
    module.launch("k", -(-n // 256), 256, args=[*inputs, *results, n])
    return results
