"""What csrc/ffi/module.cc defines; tests/meta/test_extension_stub.py holds the two together."""

FFI_API_VERSION: tuple[int, int]

def best_cpu_level() -> str:
    """The highest CPU level that processor and operating system offer."""

def cpu_handlers() -> dict[str, dict[str, object]]:
    """XLA FFI handlers of the CPU backend by call target name and stage, as capsules."""

def cpu_peak_flops(seconds: float) -> float:
    """Multiply-accumulate FLOP/s of this core with operands in registers; 0 below AVX2."""

def cpu_level() -> str:
    """The CPU level in use: 'portable', 'avx2', 'avx512', 'avx512_bf16', 'amx', or 'model'."""

def cuda_handlers() -> dict[str, dict[str, object]]:
    """Those of GPUs, which need a driver only when they run."""

def fail_sim_driver(function: str, nth: int, error: int) -> None:
    """The nth call of a driver function fails (0: every call). For tests."""

def force_cpu_level(name: str) -> None:
    """Use one CPU level for all later calls; '' goes back to the best one. For tests."""

def gemm_workspace(
    a: str,
    b: str,
    batch: int,
    m: int,
    n: int,
    k: int,
    a_batched: bool,
    b_batched: bool,
    out_dtype: str,
    grouping: str,
) -> int:
    """Bytes of the result `workspace` of a product on a GPU; a and b are operand attributes."""

def kernel_images() -> list[tuple[str, str]]:
    """(kernel, image) for every image of this build."""

def launch_counts() -> list[tuple[str, int]]:
    """Launches in this process, by kernel."""

def plan_gemm(
    a: str,
    b: str,
    batch: int,
    m: int,
    n: int,
    k: int,
    a_batched: bool,
    b_batched: bool,
    out_dtype: str,
    grouping: str,
    chip: int,
    multiprocessors: int,
) -> dict[str, object]:
    """What runs on a GPU of compute capability `chip` (100 for 10.0): csrc/plan."""

def reset_sim_driver(devices: str, seed: int) -> None:
    """A new simulated driver; devices is a list such as '100a,103a'."""

def search_nvfp4(x: object, dtype: str, amax: float, scales: object, values: object) -> None:
    """Rows of bytes (uint8): replaces scales by the best ones, and writes their codes."""

def sim_driver_reports() -> list[str]:
    """Reports of faults and warnings of the simulated driver since its reset."""

def sim_handlers() -> dict[str, dict[str, object]]:
    """Those of GPUs over the simulated driver, for the CPU platform."""

def squares(
    x: object, dtype: str, format: str, values: object, scales: object, global_scale: float
) -> tuple[float, float]:
    """Sums of (value - x)**2 and of x**2, of rows of bytes (uint8)."""
