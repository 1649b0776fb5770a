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
        module: Module,
        entry: str,
        grid: _Size,
        block: _Size,
        cluster: _Size,
        shared: int,
        parameters: bytes,
        seed: int,
        max_instructions: int,
        races: bool,
        uninitialized: bool,
    ) -> dict[str, Any]: ...

def count_forms() -> int: ...
def unreached_forms() -> list[tuple[str, str, str, str]]: ...
