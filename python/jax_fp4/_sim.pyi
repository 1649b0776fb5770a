"""What csrc/sim/python_module.cc defines; only sim.py uses it."""

from typing import Any

_Size = tuple[int, int, int]

class Module:
    def entries(self) -> list[str]: ...
    def parameters(self, entry: str) -> list[tuple[str, str, int, int, bool]]: ...

class Machine:
    def __init__(self, sm: str) -> None: ...
    def load(self, source: str) -> Module: ...
    def map(self, name: str, data: int, bytes: int, writable: bool, initialized: bool) -> int: ...
    def unmap(self, address: int) -> None: ...
    def launch(
        self,
        grids: list[tuple[Module, str, _Size, _Size, _Size, int, bytes, int]],
        max_instructions: int,
        races: bool,
        uninitialized: bool,
        strict: bool,
        mma: str,
        costs: tuple[bool, bool, bool, bool, int, int] = ...,
        quick: bool = True,
        resident_clusters: int = 0,
    ) -> list[dict[str, Any]]: ...

def tensor_map(
    address: int,
    data_type: int,
    dims: list[int],
    strides: list[int],
    box: list[int],
    element_strides: list[int],
    interleave: int,
    swizzle: int,
    l2_promotion: int,
    oob_fill: int,
) -> bytes: ...
def count_forms() -> int: ...
def unreached_forms() -> list[tuple[str, str, str, str]]: ...
