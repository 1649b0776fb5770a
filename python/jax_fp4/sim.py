"""The PTX machine: runs GPU kernels on the CPU and reports what hardware would do silently.

```python
machine = sim.Machine(sm="100a", seed=1)
kernel = machine.load(ptx)
y = machine.empty(1024, np.float32)          # reading it before it is written is reported
report = kernel.launch("saxpy", grid=8, block=128, args=[x, y, 2.0, 1024])
```

A pointer parameter takes a NumPy array, which the kernel reads and writes in place. What goes wrong
inside a kernel raises `SimulationError`. docs/simulator.md: what is modelled and what is assumed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_fp4 import _sim
from jax_fp4._sim_costs import OFF, CostModel, costs_of
from jax_fp4._sim_costs import Timing as Timing
from jax_fp4._sim_report import PACK, Checks, Parameter, Report
from jax_fp4._sim_tensor_map import native_arguments

Size = int | Sequence[int]

_DEFAULT_BUDGET = 1 << 33
_MMA_SUMS = ("model", "exact", "f32-chain")


class PtxError(ValueError):
    """The PTX text holds something that is wrong or not modelled; the message has line and text."""


class SimulationError(RuntimeError):
    """A kernel did what it must not do.

    Attributes:
        kind: "race", "out-of-bounds", "uninitialized-register", "deadlock", ...
        line: of the PTX text; 0 where there is no single one.
        report: counts up to the fault.
    """

    def __init__(self, kind: str, line: int, message: str, report: Report) -> None:
        super().__init__(message)
        self.kind = kind
        self.line = line
        self.report = report


@dataclass(frozen=True)
class Launch:
    """A kernel and everything it is launched with. Made by `Module.prepare`."""

    module: Module
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    args: tuple[Any, ...]
    seed: int


class Machine:
    """A GPU with global memory of its own.

    Args:
        sm: the chip, such as "100a", "103a", "120a", "90"; it refuses PTX that does not run there.
        seed: of the schedules; a launch may override it.
        checks: what is watched.
        mma: how MMA instructions add: "model" (the tensor core's, as docs/numerics.md assumes it),
            "exact" (one rounding, to nearest even), or "f32-chain" (product after product, every
            partial sum rounded to nearest-even f32).
        costs: True counts instructions, traffic and bank conflicts in `Report.costs`; a `CostModel`
            also models times.
        clusters: of a grid that run at a time, or CTAs; a cycle model has its own number.
    """

    def __init__(
        self,
        sm: str = "100a",
        seed: int = 0,
        checks: Checks | None = None,
        mma: Literal["model", "exact", "f32-chain"] = "model",
        costs: CostModel | bool = False,
        clusters: int = 4,
    ) -> None:
        if mma not in _MMA_SUMS:
            raise ValueError(f"mma: expected one of {', '.join(map(repr, _MMA_SUMS))}, got {mma!r}")
        self._native = _sim.Machine(sm)
        self._mma = mma
        self._costs = CostModel() if costs is True else costs or None
        self._seed = seed
        self._checks = checks or Checks()
        self._clusters = clusters
        self._buffers: dict[int, tuple[np.ndarray, int]] = {}

    def load(self, ptx: str) -> Module:
        """Parses a module; every instruction of its entries is looked up in the table.

        Args:
            ptx: the text.

        Returns:
            The module.

        Raises:
            PtxError: for anything that is not PTX or is not modelled.
        """
        try:
            return Module(self, self._native.load(ptx))
        except RuntimeError as error:
            raise PtxError(str(error)) from None

    def run(
        self, launches: Sequence[Launch], max_instructions: int = _DEFAULT_BUDGET
    ) -> list[Report]:
        """Runs grids as a stream does that got them with programmatic stream serialization.

        A grid may start when every CTA of the one before has executed
        `griddepcontrol.launch_dependents` or has exited; global accesses that no
        `griddepcontrol.wait` orders after those of earlier grids are reported.

        Args:
            launches: in order.
            max_instructions: of each; a launch that executes more ends as a timeout.

        Returns:
            What each launch did.

        Raises:
            SimulationError: if a kernel did what it must not do; its report is that kernel's.
            ValueError: if a launch itself is wrong.
        """
        mapped: dict[int, int] = {}  # device addresses by host address
        try:
            grids = [
                (x.module._native, x.entry, x.grid, x.block, x.cluster, x.smem,
                 x.module._pack(x.entry, x.args, mapped), x.seed)
                for x in launches
            ]  # fmt: skip
            # Under the cycle model grids follow each other.
            how = self._costs.native() if self._costs else OFF
            batches = [[grid] for grid in grids] if how[1] else [grids]  # timed: one by one
            watched = (self._checks.races, self._checks.uninitialized, self._checks.strict)
            more = {"mma": self._mma, "costs": how, "resident_clusters": self._clusters}
            raw = [
                one
                for batch in batches
                for one in self._native.launch(batch, max_instructions, *watched, **more)
            ]
        finally:
            for address in mapped.values():
                self._native.unmap(address)
        faults = [one.pop("fault") for one in raw]
        costs = [costs_of(one.pop("costs"), one.pop("timing")) for one in raw]
        reports = [Report(**one, costs=c) for one, c in zip(raw, costs, strict=True)]
        for fault, report in zip(faults, reports, strict=True):
            if fault is not None:
                kind, line, message = fault
                raise SimulationError(kind, line, message, report)
        return reports

    def empty(self, shape: Size, dtype: Any) -> np.ndarray:
        """An array that counts as not written, until kernels write it.

        Args:
            shape: of the array.
            dtype: of the array.

        Returns:
            The array, filled with 0xCC; it stays mapped as long as the machine lives.
        """
        array = np.frombuffer(
            bytearray(b"\xcc" * (int(np.prod(shape)) * np.dtype(dtype).itemsize)), dtype
        ).reshape(shape)
        self._map(array, initialized=False)
        return array

    def address(self, array: np.ndarray) -> int:
        """The device address of an array, mapped now and for good.

        Args:
            array: contiguous; the machine keeps it alive.

        Returns:
            The address.
        """
        key = array.__array_interface__["data"][0]
        if key not in self._buffers:
            self._map(array, initialized=True)
        return self._buffers[key][1]

    def _map(self, array: np.ndarray, *, initialized: bool) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(
                "array: expected a C-contiguous array; pass np.ascontiguousarray(array)"
            )
        key = array.__array_interface__["data"][0]
        name = f"array {len(self._buffers)}: {array.dtype}{list(array.shape)}"
        address = self._native.map(name, key, array.nbytes, array.flags.writeable, initialized)
        self._buffers[key] = (array, address)


class Module:
    """PTX that a machine has loaded. Made by `Machine.load`."""

    def __init__(self, machine: Machine, native: Any) -> None:
        self._machine = machine
        self._native = native

    @property
    def entries(self) -> list[str]:
        """Names of the kernels."""
        return self._native.entries()

    def parameters(self, entry: str) -> list[Parameter]:
        """The parameters of a kernel.

        Args:
            entry: its name.

        Returns:
            One description for each, in order.
        """
        return [Parameter(*values) for values in self._native.parameters(entry)]

    def launch(
        self,
        entry: str,
        grid: Size,
        block: Size,
        cluster: Size = 1,
        smem: int = 0,
        args: Sequence[Any] = (),
        seed: int | None = None,
        max_instructions: int = _DEFAULT_BUDGET,
    ) -> Report:
        """Runs a kernel to its end.

        Args:
            entry: name of the kernel.
            grid: CTAs in x, y, z; missing ones are 1.
            block: threads of a CTA.
            cluster: CTAs of a cluster.
            smem: bytes of dynamic shared memory.
            args: one for each parameter: an array (its device address is passed, and its memory is
                mapped for this launch), a number of the parameter's type, or bytes.
            seed: of the schedule; by default the machine's.
            max_instructions: a launch that executes more ends as a timeout.

        Returns:
            What the launch did.

        Raises:
            SimulationError: if the kernel did what it must not do.
            ValueError: if the launch itself is wrong.
        """
        launch = self.prepare(entry, grid, block, cluster, smem, args, seed)
        return self._machine.run([launch], max_instructions=max_instructions)[0]

    def prepare(
        self,
        entry: str,
        grid: Size,
        block: Size,
        cluster: Size = 1,
        smem: int = 0,
        args: Sequence[Any] = (),
        seed: int | None = None,
    ) -> Launch:
        """A launch for `Machine.run`; the arguments are those of `launch`.

        Args:
            entry: name of the kernel.
            grid: CTAs in x, y, z.
            block: threads of a CTA.
            cluster: CTAs of a cluster.
            smem: bytes of dynamic shared memory.
            args: one for each parameter.
            seed: of the schedule.

        Returns:
            The launch.

        Raises:
            ValueError: if the entry does not exist or an argument does not fit.
        """
        if entry not in self.entries:
            raise ValueError(f"entry: {entry!r} is not in the module; it has {self.entries}")
        seed = self._machine._seed if seed is None else seed
        sizes = (_size(grid), _size(block), _size(cluster))
        return Launch(self, entry, *sizes, smem, tuple(args), seed)

    def _pack(self, entry: str, args: Sequence[Any], mapped: dict[int, int]) -> bytes:
        parameters = self.parameters(entry)
        if len(args) != len(parameters):
            names = ", ".join(f"{p.name}: {p.type}" for p in parameters)
            raise ValueError(
                f"args: {entry!r} takes {len(parameters)} parameters ({names}), got {len(args)}"
            )
        end = max((p.offset + p.bytes for p in parameters), default=0)
        block = bytearray(end)
        for p, arg in zip(parameters, args, strict=True):
            block[p.offset : p.offset + p.bytes] = self._value(p, arg, mapped)
        return bytes(block)

    def _value(self, p: Parameter, arg: Any, mapped: dict[int, int]) -> bytes:
        if isinstance(arg, bytes | bytearray):
            if len(arg) != p.bytes:
                raise ValueError(f"args: {p.name!r} has {p.bytes} bytes, got {len(arg)}")
            return bytes(arg)
        if isinstance(arg, np.ndarray) and arg.ndim > 0:
            return struct.pack("<Q", self._device_address(p, arg, mapped))
        if p.is_array or p.type not in PACK:
            raise ValueError(f"args: {p.name!r} is {p.bytes} bytes of {p.type}; pass bytes")
        try:
            return struct.pack("<" + PACK[p.type], arg)
        except struct.error as error:
            raise ValueError(f"args: {p.name!r} is a {p.type}, got {arg!r}: {error}") from None

    def _device_address(self, p: Parameter, array: np.ndarray, mapped: dict[int, int]) -> int:
        if p.bytes != 8 or p.is_array:
            raise ValueError(f"args: {p.name!r} is {p.type}, which is no pointer; got an array")
        if not array.flags.c_contiguous:
            raise ValueError(f"args: {p.name!r}: expected a C-contiguous array")
        key = array.__array_interface__["data"][0]
        known = self._machine._buffers.get(key)
        if known is not None:
            return known[1]
        if key not in mapped:
            mapped[key] = self._machine._native.map(
                p.name, key, array.nbytes, array.flags.writeable, True
            )
        return mapped[key]


def tensor_map(
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    data_type: str,
    swizzle: str = "none",
    interleave: str = "none",
    element_strides: Sequence[int] | None = None,
    oob_fill: str = "zeros",
) -> bytes:
    """What cuTensorMapEncodeTiled gives: the 128 bytes of a tensor map, for a kernel parameter.

    Args:
        address: where the tensor starts; `Machine.address(array)` is that of an array.
        dims: elements in each dimension, the innermost first, as in PTX coordinates.
        strides: bytes from one element to the next, for each dimension but the innermost.
        box: elements in each dimension that one copy moves.
        data_type: CUtensorMapDataType without its prefix, in lower case: "uint8", "bfloat16",
            "16u4_align8b", ...
        swizzle: CUtensorMapSwizzle likewise: "none", "32b", "64b", "128b", "128b_atom_32b", ...
        interleave: CUtensorMapInterleave likewise: "none", "16b", "32b".
        element_strides: of the traversal; all 1 by default.
        oob_fill: what elements outside the tensor read as: "zeros" or "nan".

    Returns:
        The bytes; their format is the machine's own.

    Raises:
        ValueError: for what the driver would refuse; the text names the argument.
    """
    return _sim.tensor_map(
        *native_arguments(
            address, dims, strides, box, data_type, swizzle, interleave, element_strides, oob_fill
        )
    )


def count_forms() -> int:
    """Number of instruction forms that the machine's table describes."""
    return _sim.count_forms()


def unreached_forms() -> list[str]:
    """Alternatives of table rows that no launch of this process has executed."""
    return [
        f"{opcode} [{modifiers}] ({operands})" + (f": .{alternative}" if alternative else "")
        for opcode, modifiers, operands, alternative in _sim.unreached_forms()
    ]


def _size(size: Size) -> tuple[int, int, int]:
    values = [size] if isinstance(size, int) else list(size)
    if not 1 <= len(values) <= 3:
        raise ValueError(f"a size has one to three dimensions, got {size!r}")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z
