"""What the PTX machine's cycle model says of GPU kernels: `--modelled`.

The kernels run instruction by instruction, without data, and the model (docs/simulator.md) says how
long a B200 would take. Nobody has measured any of it, so it goes into records of its own kind.

It needs a checkout: kernels are compiled from csrc/ by NVRTC, and their arguments are laid out by
what the tests use (bench/modelled.py). An installed package has machine code only.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_fp4.cli.bench.records import Modelled, Skipped
from jax_fp4.cli.bench.shapes import Product

CHIP, CAPABILITY, SMS = "B200", 100, 148
LARGEST = 2048**3  # multiplications: half a minute to a minute for each kernel
_FOREIGN_TILE = 128  # of CuTe-DSL's and Triton's kernels, which take whole tiles only
_FOREIGN_K = 256


class Unavailable(RuntimeError):
    """There is nothing to run here; the message says what is missing."""


def _tools() -> ModuleType:
    """bench/modelled.py of the checkout that this file is in."""
    path = Path(__file__).resolve().parents[4] / "bench" / "modelled.py"
    if not path.is_file():
        raise Unavailable(
            "--modelled needs a checkout of the repository: it compiles csrc/kernels with NVRTC "
            "and runs them with what the tests use, and an installed package has neither"
        )
    spec = importlib.util.spec_from_file_location("jax_fp4_bench_modelled", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.device_kernels.compiler().check_tools()
    except Exception as error:
        raise Unavailable(
            f"--modelled needs the packages of the extra `test` ({error}): "
            "pip install 'jax-fp4[test]'"
        ) from None
    return module


def _record(
    product: Product, kernel: str, reports: Sequence[Any], flops: float, begin: float
) -> Modelled:
    costs = [report.costs for report in reports]
    times = [cost.timing for cost in costs]
    return Modelled(
        "gemm", product.label, kernel, CHIP,
        modelled_seconds=sum(t.seconds for t in times), modelled_flops=flops,
        instructions=sum(report.instructions for report in reports),
        dram_bytes=float(sum(t.dram_read + t.dram_written for t in times)),
        tensor_busy=times[0].tensor_busy_steady,
        note=f"{len(reports)} launches; modelled in {time.perf_counter() - begin:.0f} s",
    )  # fmt: skip


def rows(products: Sequence[Product]) -> list[Modelled | Skipped]:
    """Our kernel for each product, as the planner chooses it, and those of others beside it.

    Args:
        products: what to run.

    Returns:
        Modelled rows; `Skipped` ones for kernels that cannot run it, or packages that are missing.
    """
    try:
        tools = _tools()
    except Unavailable as error:
        return [Skipped("modelled", "", "", "all", str(error))]
    found: list[Modelled | Skipped] = []
    for product in products:
        shape = (product.m, product.n, product.k)

        def skip(kernel: str, reason: str, label: str = product.label) -> None:
            found.append(Skipped("modelled", "", label, kernel, reason))

        if product.m * product.n * product.k > LARGEST:
            skip("all", f"more than {LARGEST:.1e} multiplications take minutes: fewer --tokens")
            continue
        from jax_fp4 import _native
        from jax_fp4.formats import NVFP4

        operand = f"{NVFP4.attribute()} layout=tiled"
        plan = _native.plan_gemm(
            operand, operand, (1, *shape), (False, False), "bfloat16", CAPABILITY, SMS
        )
        begin = time.perf_counter()
        reports = tools.planned_gemm(plan, *shape)
        kernel = f"jax_fp4 {plan['kernel']}, bf16"
        found.append(_record(product, kernel, reports, product.flops, begin))
        others: list[tuple[str, Any]] = [
            ("CuTe-DSL 128x128, f32", lambda s=shape: tools.cute_gemm(1, *s)),
            ("CuTe-DSL 256x128, f32", lambda s=shape: tools.cute_gemm(2, *s)),
            ("Triton 128x128, f32", lambda s=shape: tools.triton_gemm(*s)),
        ]
        for name, run in others:
            rows_needed = 256 if "256x" in name else _FOREIGN_TILE
            if product.m % rows_needed or product.n % _FOREIGN_TILE or product.k % _FOREIGN_K:
                skip(name, f"takes multiples of {rows_needed}x{_FOREIGN_TILE}x{_FOREIGN_K} only")
                continue
            begin = time.perf_counter()
            try:
                report = run()
            except Exception as error:
                skip(name, f"{type(error).__name__}: {error}".splitlines()[0])
                continue
            found.append(_record(product, name, [report], product.flops, begin))
    return found
