"""A whole NVFP4 product on tcgen05: tensor copies, tcgen05.cp of scale factors, two stages."""

import time

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import mma
from support.nvrtc import compile_to_ptx

# D = A B^T with A [M, K] and B [N, K] of packed E2M1, scales in atoms of 128 x 4.
#
#   warps 0-3   epilogue: wait for `done`, tensor memory -> D
#   warp 4      one thread: boxes of 256 elements of K, and their scale atoms, into a stage
#   warp 5      allocates; one thread: tcgen05.cp of the scales, four MMAs a stage
#
#   full[s]   1 arrival and the bytes of a stage     copies -> MMA
#   empty[s]  1 arrival by tcgen05.commit            MMA -> copies
#   done      1 arrival by tcgen05.commit            MMA -> epilogue
#
#   stage     | A 16384 | B 32768 | SFA 2048 | SFB 4096 |
#   columns   | D 256 | stage 0: SFA 16, SFB 32 | stage 1: SFA 16, SFB 32 | to 512 |
SOURCE = r"""
struct alignas(64) Map { unsigned long long words[16]; };
constexpr unsigned kStage = 16384 + 32768 + 2048 + 4096, kStages = 2;
constexpr unsigned kColumns = 256, kStageColumns = 48;
constexpr unsigned kInstruction = 1u << 7 | 1u << 10 | (256 >> 3) << 17 | (128 >> 7) << 27;

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(unsigned bar, unsigned parity) {
  asm volatile("{ .reg .pred p;"
               " W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W; }"
               :: "r"(bar), "r"(parity) : "memory");
}
__device__ void load(unsigned to, const Map* map, unsigned x, unsigned y, unsigned bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
__device__ void copy_scales(unsigned column, unsigned from) {
  const unsigned long long descriptor = 0x0000400800000000ull | (from & 0x3FFFF) >> 4;
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"
               :: "r"(column), "l"(descriptor) : "memory");
}
__device__ void commit(unsigned bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               :: "r"(bar) : "memory");
}

extern "C" __global__ void __launch_bounds__(192)
gemm(const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map sfa,
     const __grid_constant__ Map sfb, float* d, int n, int k) {
  extern __shared__ __align__(1024) unsigned char stages[];
  __shared__ unsigned long long full[kStages], empty[kStages], done;
  __shared__ unsigned slot;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = k / 256;
  const unsigned row = blockIdx.y * 128, column = blockIdx.x * 256, base = shared_address(stages);
  if (threadIdx.x == 0) {
    for (unsigned s = 0; s < kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(full + s)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(empty + s)));
    }
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&done)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == 5)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;"
                 :: "r"(shared_address(&slot)) : "memory");
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const unsigned tensor = slot;

  if (warp == 4 && lane == 0) {
    for (unsigned i = 0; i < blocks; ++i) {
      const unsigned s = i % kStages, at = base + s * kStage, bar = shared_address(full + s);
      if (i >= kStages) wait(shared_address(empty + s), i / kStages - 1 & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   :: "r"(bar), "r"(kStage) : "memory");
      load(at, &a, i * 128, row, bar);
      load(at + 16384, &b, i * 128, column, bar);
      load(at + 49152, &sfa, 0, blockIdx.y * blocks * 4 + i * 4, bar);
      load(at + 51200, &sfb, 0, blockIdx.x * blocks * 8 + i * 4, bar);
      load(at + 53248, &sfb, 0, blockIdx.x * blocks * 8 + blocks * 4 + i * 4, bar);
    }
  } else if (warp == 5 && lane == 0) {
    for (unsigned i = 0; i < blocks; ++i) {
      const unsigned s = i % kStages, at = base + s * kStage;
      const unsigned scales = tensor + kColumns + s * kStageColumns;
      wait(shared_address(full + s), i / kStages & 1);
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
      for (unsigned j = 0; j < 4; ++j) {
        copy_scales(scales + 4 * j, at + 49152 + 512 * j);
        // The two halves of B's columns lie side by side for each step.
        copy_scales(scales + 16 + 8 * j, at + 51200 + 512 * j);
        copy_scales(scales + 20 + 8 * j, at + 53248 + 512 * j);
      }
      for (unsigned j = 0; j < 4; ++j) {
        const unsigned long long left = 0x4000404000000000ull | (at & 0x3FFFF) >> 4;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %6, 0;"
                     " tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"
                     " [%0], %1, %2, %3, [%4], [%5], p; }"
                     :: "r"(tensor), "l"(left + 2 * j), "l"(left + 1024 + 2 * j),
                        "r"(kInstruction), "r"(scales + 4 * j), "r"(scales + 16 + 8 * j),
                        "r"(i | j) : "memory");
      }
      commit(shared_address(empty + s));
    }
    commit(shared_address(&done));
  }
  __syncwarp();
  if (warp < 4) {
    wait(shared_address(&done), 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    float* out = d + (size_t)(row + threadIdx.x) * n + column;
    for (unsigned c = 0; c < kColumns; c += 8) {
      float v[8];
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                   " tcgen05.wait::ld.sync.aligned;"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]),
                     "=f"(v[6]), "=f"(v[7])
                   : "r"(tensor + (warp << 21) + c) : "memory");
      for (unsigned j = 0; j < 8; ++j) out[c + j] = v[j];
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  }
  __syncthreads();
  if (warp == 5)
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" :: "r"(tensor));
}
"""
STAGE_BYTES, STAGES = 55296, 2


def atoms(scales: np.ndarray) -> np.ndarray:
    """Scales [rows, n] as [rows / 128, n / 4] atoms of 512 bytes: (row % 32, row / 32, n % 4)."""
    rows, n = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, n // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1, 512)


def gemm(
    machine: sim.Machine, a: np.ndarray, b: np.ndarray, sa: np.ndarray, sb: np.ndarray
) -> np.ndarray:
    """D [M, N] of codes [rows, K] and scale bytes [rows, K / 16]."""
    (m, k), n = a.shape, len(b)
    packed = [np.ascontiguousarray(x[:, ::2] | x[:, 1::2] << 4) for x in (a, b)]
    scales = [atoms(x) for x in (sa, sb)]
    maps = [
        sim.tensor_map(
            machine.address(x), (k // 2, len(x)), (k // 2,), (128, rows), "uint8", "128b"
        )
        for x, rows in zip(packed, (128, 256), strict=True)
    ]
    maps += [
        sim.tensor_map(machine.address(x), (128, len(x)), (512,), (128, 4), "uint32", "none")
        for x in scales
    ]
    d = np.full((m, n), np.nan, np.float32)
    module = machine.load(compile_to_ptx(SOURCE, "sm_100a"))
    module.launch(
        "gemm", (n // 256, m // 128), 192, 1, STAGE_BYTES * STAGES, [*maps, d, n, k],
    )  # fmt: skip
    return d


def operands(m: int, n: int, k: int, seed: int) -> tuple[np.ndarray, ...]:
    """Random codes and scales of moderate size."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, 16, (rows, k)).astype(np.uint8) for rows in (m, n)]
    return *codes, *(rng.integers(0x20, 0x48, (r, k // 16)).astype(np.uint8) for r in (m, n))


def check_rows(d: np.ndarray, x: tuple[np.ndarray, ...], rows: np.ndarray) -> None:
    """These rows of D, bit for bit."""
    a, b, sa, sb = x
    want = mma.product_k64(a[rows], b, sa[rows], sb, "ue4m3")
    np.testing.assert_array_equal(d[rows].view(np.uint32), want)


@pytest.mark.parametrize("seed", range(4))
def test_product(seed: int) -> None:
    """Two tiles of D, three blocks of K; every output of eight rows of each tile."""
    x = operands(256, 256, 768, seed)
    d = gemm(sim.Machine("100a", seed=seed), *x)
    check_rows(d, x, np.arange(seed, 256, 16))


def test_product_of_1024_takes_seconds() -> None:
    """1024^3 within ten seconds of processor time, all checks on."""
    x = operands(1024, 1024, 1024, 5)
    start = time.process_time()
    d = gemm(sim.Machine("100a"), *x)
    seconds = time.process_time() - start
    check_rows(d, x, np.arange(7, 1024, 128))
    assert seconds < 10
    print(f"{seconds:.2f} s, {1.073741824 / seconds:.2f} GMAC/s")
