"""What the PTX machine's cycle model says of our kernels. Every time that is printed is modelled.

    python bench/modelled.py gemm        4096^3, ours beside kernels by others, on sm_100 and sm_120
    python bench/modelled.py ratios      against published ratios (docs/simulator.md, "Costs")
    python bench/modelled.py quantize    rows and columns of a bf16 matrix in one pass

No data are moved or multiplied, which takes up to three minutes a product. NVRTC compiles our
kernels; others' are there where their packages are installed (extras `test` and `foreign`).
CUTLASS's examples take minutes to compile: `--programs` names a folder that keeps them.
"""

import argparse
import dataclasses
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jax_fp4 import sim
from jax_fp4._sim_costs import Costs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import device_kernels, gemm_kernels
from support.cpu_quantize import Options
from support.gemm_kernels import Operand, Problem, Variant
from support.repository import ROOT

MODEL = sim.CostModel(time=True, data=False)
STAGES = "constexpr u32 kStages = kVariant.stages();"
PAIR, SINGLE = Variant("nvfp4", 2, 256), Variant("nvfp4", 1, 256)


def gemm_ptx(variant: Variant, stages: int | None) -> str:
    """PTX of gemm_sm100.cu, also of tiles that variants.def does not have."""
    row = dataclasses.replace(
        device_kernels.kernel(f"gemm_sm100_{variant.kind}_128x128"),
        name=variant.name,
        defines=(
            f"JAX_FP4_KIND={variant.kind}",
            f"JAX_FP4_CTAS={variant.group}",
            f"JAX_FP4_TILE_N={variant.tile_n}",
        ),
    )
    source = (ROOT / "csrc" / "kernels" / row.source).read_text()
    if stages is not None:
        assert source.count(STAGES) == 1
        source = source.replace(STAGES, f"constexpr u32 kStages = {stages};")
    return device_kernels.compiler().compile_ptx(row, "100f", source)


def operand(rows: int, k: int, block: int) -> Operand:
    """Zeros: nobody looks at them."""
    codes, scales = np.zeros((1, rows, k), np.uint8), np.zeros((1, rows, k // block), np.uint8)
    return Operand("e2m1", codes, scales, np.ones(1, np.float32))


def gemm(
    variant: Variant,
    m: int,
    n: int,
    k: int,
    out: str = "bf16",
    stages: int | None = None,
    model: sim.CostModel = MODEL,
) -> sim.Report:
    """A product by our kernel."""
    machine = sim.Machine(variant.chip, costs=model)
    problem = Problem(variant, operand(m, k, variant.block), operand(n, k, variant.block), out)
    sm100 = variant.family == "sm100"
    module = machine.load(gemm_ptx(variant, stages) if sm100 else gemm_kernels.ptx(variant))
    return gemm_kernels.Run(problem, machine, module).launch()


def planned_gemm(plan: dict[str, object], m: int, n: int, k: int) -> list[sim.Report]:
    """The launches that a plan (`python -m jax_fp4 plan`) makes of one product, bf16 out."""
    rows, columns = re.fullmatch(r"gemm_sm100_nvfp4_(\d+)x(\d+)", str(plan["kernel"])).groups()
    variant = Variant("nvfp4", int(rows) // 128, int(columns))
    a, b = (n, m) if plan["exchanged"] else (m, n)
    problem = Problem(
        variant,
        operand(a, k, variant.block),
        operand(b, k, variant.block),
        "bf16",
        splits=int(str(plan["splits"])),
        transposed=bool(plan["exchanged"]),
    )
    machine = sim.Machine("100a", costs=MODEL)
    run = gemm_kernels.Run(problem, machine, machine.load(gemm_ptx(variant, None)))
    return machine.run(run.prepare())


def triton_gemm(m: int, n: int, k: int, chip: int = 100) -> sim.Report:
    """tl.dot_scaled with scales in the 128x4 layout, f32 out.

    Tiles of 128 x 128 x 256, on sm_120 of 128 x 128 x 128, which its shared memory has room for.
    """
    from support import triton_kernels as kernels

    types = ("*u8", "*fp8e4nv", "*u8", "*fp8e4nv", "*fp32", "i32", "i32")
    tile_k = 256 if chip == 100 else 128
    kernel = kernels.compiled(kernels.dot_fp4_tiled, chip, types, (128, 128, tile_k, 16))
    codes = [np.zeros((rows, k // 2), np.uint8) for rows in (m, n)]
    scales = [np.zeros((rows, k // 16), np.uint8) for rows in (m, n)]
    args = [codes[0], scales[0], codes[1], scales[1], np.zeros((m, n), np.float32), n, k]
    return kernel.launch(f"{chip}a", (m // 128, n // 128), args, 0, costs=MODEL)


def cute_gemm(ctas: int, m: int, n: int, k: int) -> sim.Report:
    """NVIDIA's persistent example in CuTe-DSL, tiles of 128 ctas x 128, f32 out."""
    from support import cute_kernels as kernels

    clusters = 148 // ctas
    ptx = kernels.compiled("nvfp4", ctas, m, n, k, clusters)
    codes = [np.zeros((rows, k), np.uint8) for rows in (m, n)]
    scales = [np.zeros((rows, k // 16), np.uint8) for rows in (m, n)]
    return kernels.launch(ptx, "nvfp4", ctas, codes, scales, clusters, 0, costs=MODEL)[1]


def print_gemm(
    name: str,
    costs: Costs | None,
    m: int,
    n: int,
    k: int,
    tile: tuple[int, int],
    out_bytes: int,
    block: int = 16,
) -> float:
    """A row of the table; PFLOP/s, modelled."""
    assert costs is not None and costs.timing is not None
    t, shared = costs.timing, costs.counts["shared"]
    rate = 2 * m * n * k / t.seconds / 1e15
    row, d = k // 2 + k // block, m * n * out_bytes  # bytes of codes with their scales, and of D
    dram = (t.dram_read + t.dram_written) / ((m + n) * row + d)
    # Every tile reads its rows of A and B once.
    l2 = (t.l2_read + t.l2_written) / ((m // tile[0]) * (n // tile[1]) * sum(tile) * row + d)
    conflicts = shared["load_conflicts"] + shared["store_conflicts"]
    wavefronts = shared["load_wavefronts"] + shared["store_wavefronts"]
    print(
        f"{name:40} {tile[0]}x{tile[1]} {t.seconds * 1e6:6.1f} us {rate:5.2f} PFLOP/s, "
        f"tensor pipe busy {t.tensor_busy_steady:4.0%}, L2 reads {t.l2_read / 2**20:4.0f} MiB, "
        f"L2 traffic / tiles' minimum {l2:.3f}, DRAM / minimum {dram:.2f}, "
        f"bank conflicts {conflicts / wavefronts:.1%}",
        flush=True,
    )
    return rate


def run_gemm(size: int, programs: Path) -> None:
    """Ours and others' at size^3."""
    from support import cutlass_examples

    shape = (size, size, size)
    wide, square = (256, 128), (128, 128)

    def ours(name: str, variant: Variant, out: str) -> None:
        tile = (variant.tile_m, variant.tile_n)
        costs = gemm(variant, *shape, out).costs
        print_gemm(f"ours, {name}, {out}", costs, *shape, tile, {"bf16": 2, "f32": 4}[out])

    def theirs(name: str, run: Callable[[], Costs | None], tile: tuple[int, int], out: str) -> None:
        try:
            costs = run()
        except (ImportError, FileNotFoundError) as error:
            print(f"{name}: not run ({error})")
            return
        print_gemm(f"{name}, {out}", costs, *shape, tile, {"bf16": 2, "f32": 4}[out])

    def cutlass(name: str) -> Costs:
        if not (programs / name).exists():
            cutlass_examples.build(name, programs)
        return cutlass_examples.modelled(programs / name, name, shape)

    print(f"NVFP4 {size}^3 on a B200 (148 SMs) as modelled")
    for out in ("bf16", "f32"):
        ours("pairs", PAIR, out)
        ours("pairs", Variant("nvfp4", 2, 128), out)
        ours("one CTA", Variant("nvfp4", 1, 128), out)
    theirs("CUTLASS 72a, clusters of 2x4", lambda: cutlass("72a"), (256, 256), "bf16")
    theirs("CUTLASS 72a tuned, pairs", lambda: cutlass("72a-tuned"), (256, 256), "bf16")
    theirs("CuTe-DSL, one CTA", lambda: cute_gemm(1, *shape).costs, square, "f32")
    theirs("CuTe-DSL, pairs", lambda: cute_gemm(2, *shape).costs, wide, "f32")
    theirs("Triton", lambda: triton_gemm(*shape).costs, square, "f32")
    print(f"NVFP4 {size}^3 on an RTX 5090 (170 SMs) as modelled")
    for out in ("bf16", "f32"):
        ours("one CTA", Variant("nvfp4", 1, 128, "sm120"), out)
    theirs("CUTLASS 79a", lambda: cutlass("79a"), square, "bf16")
    theirs("Triton", lambda: triton_gemm(*shape, chip=120).costs, square, "f32")


def run_ratios(size: int) -> None:
    """Modelled beside published ratios (sources: docs/simulator.md)."""

    def row(text: str, modelled: float, published: str) -> None:
        print(f"{text:46} modelled {modelled:5.3f}   published {published}", flush=True)

    print(f"M = N = {size}; rates of each product, then the ratios")
    shape = (size, size, 8192)
    wide, tall = (256, 256), (128, 256)
    pair = print_gemm("pairs", gemm(PAIR, *shape).costs, *shape, wide, 2)
    one = print_gemm("one CTA", gemm(SINGLE, *shape).costs, *shape, tall, 2)
    row("pairs over one CTA, NVFP4, K = 8192", pair / one, "1.15 to 1.20")
    shape = (size, size, 16384)
    mx = Variant("mxfp4", 2, 256)
    rates = {
        stages: print_gemm(
            f"MXFP4, {stages} stages", gemm(mx, *shape, stages=stages).costs, *shape, wide, 2, 32
        )
        for stages in (3, 4, 5)
    }
    row("4 stages over 3, MXFP4, K = 16384", rates[4] / rates[3], "1.172")
    row("5 stages over 4", rates[5] / rates[4], "1.056")
    row("5 stages over 3", rates[5] / rates[3], "1.237")
    f32 = print_gemm("NVFP4, f32 out", gemm(PAIR, *shape, "f32").costs, *shape, wide, 4)
    bf16 = print_gemm("NVFP4, bf16 out", gemm(PAIR, *shape).costs, *shape, wide, 2)
    row("f32 output over bf16, NVFP4, K = 16384", f32 / bf16, "0.887")
    row("NVFP4 over MXFP4, K = 16384", bf16 / rates[5], "0.975 to 0.984")


@dataclasses.dataclass
class TimedDevice(device_kernels.Device):
    """A device whose machine models times; bytes are moved, races are not looked for."""

    ctas_per_sm: int | None = None

    def machine(self) -> sim.Machine:
        """A machine with nothing in its memory."""
        model = sim.CostModel(time=True, ctas_per_sm=self.ctas_per_sm)
        return sim.Machine(self.chip, checks=sim.Checks(False, False), costs=model)


def run_quantize(rows: int, cols: int) -> None:
    """Instructions, conflicts and traffic of one pass that writes both copies."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((1, rows, cols)).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    copies = [Options(format="NVFP4", axis=axis, tiled_layout=True) for axis in (1, 0)]
    device = TimedDevice(ctas_per_sm=6)  # kResident of quantize_tile.h: registers for six
    device_kernels.quantize(device, x, *copies)
    _, report = device.reports[-1]
    assert report.costs is not None
    t, counts = report.costs.timing, report.costs.counts
    assert t is not None
    shared, elements = counts["shared"], rows * cols
    wavefronts = shared["load_wavefronts"] + shared["store_wavefronts"]
    conflicts = shared["load_conflicts"] + shared["store_conflicts"]
    least = elements * 2 + 2 * (elements // 2 + elements // 16)
    lanes = sum(counts["lane_instructions"].values())
    print(f"bf16 [{rows}, {cols}] to NVFP4 along rows and columns, on a B200 as modelled")
    print(f"  {t.seconds * 1e6:.1f} us, {least / t.seconds / 1e12:.2f} TB/s of the minimum traffic")
    print(f"  PTX instructions per element (both copies): {lanes / elements:.1f}")
    print(f"  issue slots used: {t.issue_busy:.1%}, CTAs an SM: {t.ctas_per_sm}")
    print(f"  DRAM traffic / minimum: {(t.dram_read + t.dram_written) / least:.3f}")
    print(f"  bank conflicts: {conflicts / wavefronts:.1%} of {wavefronts} wavefronts")


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("gemm", "ratios", "quantize"))
    parser.add_argument("--size", type=int, default=4096, help="rows and columns")
    parser.add_argument("--programs", type=Path, help="folder of CUTLASS's compiled examples")
    options = parser.parse_args()
    if options.what == "gemm":
        with tempfile.TemporaryDirectory() as temporary:
            run_gemm(options.size, options.programs or Path(temporary))
    elif options.what == "ratios":
        run_ratios(options.size)
    else:
        run_quantize(options.size, options.size)


if __name__ == "__main__":
    main()
