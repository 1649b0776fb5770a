"""What csrc/ffi/module.cc defines; tests/meta/test_extension_stub.py holds the two together."""

FFI_API_VERSION: tuple[int, int]

def best_cpu_level() -> str:
    """The highest CPU level that processor and operating system offer."""

def cpu_handlers() -> dict[str, object]:
    """XLA FFI handlers of the CPU backend by call target name, as capsules."""

def cpu_peak_flops(seconds: float) -> float:
    """Multiply-accumulate FLOP/s of this core with operands in registers; 0 below AVX-512."""

def cpu_level() -> str:
    """The CPU level in use: 'portable', 'avx512', 'amx', or 'model' when forced."""

def force_cpu_level(name: str) -> None:
    """Use one CPU level for all later calls; '' goes back to the best one. For tests."""
