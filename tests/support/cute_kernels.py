"""NVIDIA's block-scaled GEMM in CuTe-DSL, compiled to PTX: neither kernel nor compiler is ours.

PyTorch ships the persistent, warp-specialised example of CUTLASS among its templates, and
nvidia-cutlass-dsl compiles it without a GPU. Its host code needs a driver; what that would pass to
the kernel is built here: five tensor maps and the divisors of the tile scheduler.
"""

import functools
import os
import struct
import tempfile
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from jax_fp4 import sim
from oracles import pack

THREADS = 192  # four warps store, one multiplies, one copies
SHARED = 227 * 1024  # the kernel has as many stages as fit
TILE_N = 128


@dataclass(frozen=True)
class Kind:
    """Operands: element and scale types of the DSL, and how the kernel sees them."""

    elements: str
    scales: str
    block: int  # elements of a scale
    bits: int

    @property
    def tile_k(self) -> int:
        """Elements of 128 bytes, the rows of a stage."""
        return 1024 // self.bits


KINDS = {
    "nvfp4": Kind("Float4E2M1FN", "Float8E4M3FN", 16, 4),
    "mxfp4": Kind("Float4E2M1FN", "Float8E8M0FNU", 32, 4),
    "mxfp8": Kind("Float8E4M3FN", "Float8E8M0FNU", 32, 8),
}


@functools.cache
def compiled(name: str, ctas: int, m: int, n: int, k: int, clusters: int) -> str:
    """PTX of D [M, N] = A [M, K] B [N, K]^T in f32, by tiles of 128 * ctas x 128.

    Args:
        name: of KINDS.
        ctas: 1, or 2 for pairs.
        m: rows of A.
        n: rows of B.
        k: columns of both.
        clusters: that run at a time, each on several tiles.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")  # there is no device to ask
    os.environ.setdefault("CUTE_DSL_DISABLE_FILE_CACHING", "1")
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as dumps:
        warnings.simplefilter("ignore")  # other people's
        import cutlass
        from cutlass import cute
        from cutlass.cute import runtime

        # Names of an older release, which the example still uses; 4.8.1 takes strings there.
        cute.arch.ProxyKind = SimpleNamespace(async_shared="async.shared")
        cute.arch.SharedSpace = SimpleNamespace(shared_cta="cta")
        from torch._inductor.kernel.vendored_templates.cutedsl import (
            dense_blockscaled_gemm_persistent as example,
        )

        kind = KINDS[name]
        elements, scales = getattr(cutlass, kind.elements), getattr(cutlass, kind.scales)

        def tensor(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            return runtime.make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)

        gemm = example.Sm100BlockScaledPersistentDenseGemmKernel(
            kind.block, (128 * ctas, TILE_N), (ctas, 1)
        )
        built = cute.compile(
            gemm,
            tensor(elements, (1, m, k), (m * k, k, 1)),
            tensor(elements, (1, k, n), (k * n, 1, k)),
            tensor(scales, (m * k // kind.block,), (1,)),
            tensor(scales, (n * k // kind.block,), (1,)),
            tensor(cutlass.Float32, (1, m, n), (m * n, n, 1)),
            clusters,
            runtime.make_fake_stream(),
            options=f"--keep-ptx --dump-dir {dumps} --gpu-arch sm_100a",
        )
        return built.__ptx__


def divisor(d: int) -> bytes:
    """d, a multiplier m and two shifts, for n / d = (((n - h) >> s) + h) >> t, h = n * m >> 32.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication, figure 4.1.
    """
    bits = (d - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << bits) - d)) // d + 1
    return struct.pack("<IIBBxx", d, multiplier, min(bits, 1), max(bits - 1, 0))


def launch(
    ptx: str,
    name: str,
    ctas: int,
    codes: list[np.ndarray],
    scales: list[np.ndarray],
    clusters: int,
    seed: int,
    checks: sim.Checks | None = None,
    costs: sim.CostModel | bool = False,
) -> tuple[np.ndarray, sim.Report]:
    """D of A and B, codes [rows, K] with scale bytes [rows, K / block], and the report."""
    kind = KINDS[name]
    m, n = len(codes[0]), len(codes[1])
    k = codes[0].shape[1]
    machine = sim.Machine("100a", seed=seed, checks=checks, costs=costs)
    module = machine.load(ptx)
    d = machine.empty((m, n), np.float32)
    maps = []
    element_type = "16u4_align8b" if kind.bits == 4 else "uint8"
    for x, rows in zip(codes, (128, TILE_N // ctas), strict=True):
        packed = pack.pack(x, kind.bits)
        size, pitch = (k, len(x)), (packed.shape[1],)
        box = (kind.tile_k, rows)
        maps.append(sim.tensor_map(machine.address(packed), size, pitch, box, element_type, "128b"))
    # Scales: 512 bytes for 128 rows and four blocks. Each CTA of a pair copies half of B's to both.
    per_tile = kind.tile_k // kind.block // 4
    for x, parts in zip(scales, (1, ctas), strict=True):
        tiled = pack.tile_scales(x)
        tiles, atoms = tiled.shape[:2]
        if per_tile > 1:
            size, pitch = [256, atoms, tiles], [512, 512 * atoms]
            box = [256, per_tile // parts, 1]
        else:
            size, pitch = [256, tiles, atoms], [512 * atoms, 512]
            box = [256 // parts, 1, 1]
        maps.append(sim.tensor_map(machine.address(tiled), size, pitch, box, "uint16"))
    maps.append(sim.tensor_map(machine.address(d), (n, m), (4 * n,), (32, 128), "float32", "128b"))
    tiles_m, tiles_n = -(-m // (128 * ctas)), -(-n // TILE_N)
    # Two MMA objects without negation; the scheduler: tiles along M, N, the batch, and all.
    divisors = [divisor(x) for x in (tiles_m, tiles_n, 1, tiles_m * tiles_n)]
    args = [bytes(12), bytes(12), *maps, *divisors]
    grid = (ctas, 1, min(clusters, tiles_m * tiles_n))
    report = module.launch(module.entries[0], grid, THREADS, (ctas, 1, 1), SHARED, args)
    return d, report
