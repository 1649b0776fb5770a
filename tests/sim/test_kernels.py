"""CUDA C++ kernels through NVRTC, run on the machine under all checks, equal NumPy."""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import tables
from support.nvrtc import compile_to_ptx

SOURCE = r"""
extern "C" __global__ void vector_add(const float* x, const float* y, float* z, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = x[i] + y[i];
}
extern "C" __global__ void block_sum(const int* x, int* sums, int n) {
  __shared__ int partial[8];
  int total = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    total += x[i];
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x < 32) {
    total = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
    total = __reduce_add_sync(~0u, total);
    if (threadIdx.x == 0) atomicAdd(sums, total);
  }
}
extern "C" __global__ void transpose(const float* x, float* y, int rows, int cols) {
  __shared__ float tile[32][33];
  int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
  for (int i = 0; i < 32; i += 8)
    if (r + i < rows && c < cols) tile[threadIdx.y + i][threadIdx.x] = x[(r + i) * cols + c];
  __syncthreads();
  c = blockIdx.y * 32 + threadIdx.x, r = blockIdx.x * 32 + threadIdx.y;
  for (int i = 0; i < 32; i += 8)
    if (r + i < cols && c < rows) y[(r + i) * rows + c] = tile[threadIdx.x][threadIdx.y + i];
}
extern "C" __global__ void product(const float* a, const float* b, float* c, int n) {
  extern __shared__ float memory[];
  float *left = memory, *right = memory + 256;
  const int x = threadIdx.x, y = threadIdx.y;
  float sum = 0;
  for (int k = 0; k < n; k += 16) {
    left[y * 16 + x] = a[(blockIdx.y * 16 + y) * n + k + x];
    right[y * 16 + x] = b[(k + y) * n + blockIdx.x * 16 + x];
    __syncthreads();
    for (int j = 0; j < 16; ++j) sum = __fmaf_rn(left[y * 16 + j], right[j * 16 + x], sum);
    __syncthreads();
  }
  c[(blockIdx.y * 16 + y) * n + blockIdx.x * 16 + x] = sum;
}
extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, int n) {
  __shared__ unsigned local[64];
  for (int i = threadIdx.x; i < 64; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&local[x[i] % 64], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < 64; i += blockDim.x) atomicAdd(&bins[i], local[i]);
}
__device__ __noinline__ unsigned step(unsigned n) { return n % 2 ? 3 * n + 1 : n / 2; }
extern "C" __global__ void collatz(unsigned* lengths) {
  unsigned n = blockIdx.x * blockDim.x + threadIdx.x + 1, length = 0;
  while (n != 1) {
    n = step(n);
    if (++length > 1000) return;
  }
  lengths[blockIdx.x * blockDim.x + threadIdx.x] = length;
}
__constant__ int weights[5] = {1, 2, 3, 2, 1};
extern "C" __global__ void stack_and_constants(const int* x, int* y) {
  int window[5];
  const int i = threadIdx.x;
  for (int k = 0; k < 5; ++k) window[(k * 3 + x[i]) % 5] = x[(i + k) % 32] * weights[k];
  int sum = 0;
  for (int k = 0; k < 5; ++k) sum = sum * 7 + window[(k + x[(i + 1) % 32]) % 5];
  y[i] = sum;
}
extern "C" __global__ void to_bf16_and_back(const float* x, unsigned short* narrow,
                                            float* wide, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned short h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x[i]));
  narrow[i] = h;
  asm("cvt.f32.bf16 %0, %1;" : "=f"(wide[i]) : "h"(h));
}
extern "C" __global__ void to_fp8_and_fp4(const float* x, unsigned short* e4m3,
                                          unsigned char* e2m1, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (2 * i >= n) return;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(e4m3[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
  unsigned short pair;
  asm("{.reg .b8 both;\n cvt.rn.satfinite.e2m1x2.f32 both, %1, %2;\n cvt.u16.u8 %0, both;}"
      : "=h"(pair) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
  e2m1[i] = pair & 0xFF;
}
extern "C" __global__ void quotients(const float* x, const float* y, float* q, float* root,
                                     double* d, long long* m, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  q[i] = x[i] / y[i];
  root[i] = sqrtf(fabsf(x[i]));
  d[i] = static_cast<double>(x[i]) / y[i];
  m[i] = static_cast<long long>(x[i] * 1000) % (static_cast<long long>(y[i] * 100) + 977);
}
"""


@pytest.fixture(scope="module", params=["sm_100a", "sm_120a", "sm_80"])
def kernels(request: pytest.FixtureRequest) -> sim.Module:
    source = SOURCE
    if request.param == "sm_80":  # no such conversions there
        start = source.index('extern "C" __global__ void to_fp8')
        source = source[:start] + source[source.index('extern "C" __global__ void quotients') :]
    ptx = compile_to_ptx(source, request.param)
    return sim.Machine(request.param.removeprefix("sm_"), seed=5).load(ptx)


def random(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_vector_add(kernels: sim.Module) -> None:
    """A size that fills no block; the array behind the end stays as it was."""
    x, y, z = random(1000), random(1000, 1), np.full(1003, 7, np.float32)
    kernels.launch("vector_add", 8, 128, args=[x, y, z, 1000])
    np.testing.assert_array_equal(z[:1000], x + y)
    assert (z[1000:] == 7).all()


def test_sum_with_shuffles_and_atomics(kernels: sim.Module) -> None:
    """Grid-stride loop, shuffles, shared memory, redux, atomics; for several schedules."""
    x = np.random.default_rng(1).integers(-1000, 1000, 5000).astype(np.int32)
    for seed in range(4):
        total = np.zeros(1, np.int32)
        kernels.launch("block_sum", 3, 256, args=[x, total, x.size], seed=seed)
        assert total[0] == x.sum()


@pytest.mark.parametrize("shape", [(32, 32), (50, 70), (1, 33)])
def test_transpose(kernels: sim.Module, shape: tuple[int, int]) -> None:
    """Through shared memory, sizes that no tile divides."""
    x = random(shape)
    y = np.zeros(shape[::-1], np.float32)
    kernels.launch(
        "transpose", (-(-shape[1] // 32), -(-shape[0] // 32)), (32, 8), args=[x, y, *shape]
    )
    np.testing.assert_array_equal(y, x.T)


def test_matrix_product(kernels: sim.Module) -> None:
    """Dynamic shared memory; integer values, so that the sum is exact."""
    a, b = (np.random.default_rng(s).integers(-9, 9, (48, 48)).astype(np.float32) for s in (0, 1))
    c = np.zeros((48, 48), np.float32)
    kernels.launch("product", (3, 3), (16, 16), smem=2048, args=[a, b, c, 48])
    np.testing.assert_array_equal(c, a @ b)


def test_histogram(kernels: sim.Module) -> None:
    """Atomics on shared and global memory."""
    x = np.random.default_rng(2).integers(0, 256, 3000).astype(np.uint8)
    bins = np.zeros(64, np.uint32)
    kernels.launch("histogram", 4, 96, args=[x, bins, x.size])
    np.testing.assert_array_equal(bins, np.bincount(x % 64, minlength=64))


def test_divergent_loop_with_a_called_function(kernels: sim.Module) -> None:
    """A device function that is not inlined, called by lanes that leave the loop one by one."""
    lengths = np.zeros(96, np.uint32)
    report = kernels.launch("collatz", 3, 32, args=[lengths])

    def length(n: int) -> int:
        return 0 if n == 1 else 1 + length(3 * n + 1 if n % 2 else n // 2)

    np.testing.assert_array_equal(lengths, [length(n) for n in range(1, 97)])
    assert report.lane_instructions < report.instructions * 32


def test_local_arrays_and_constants(kernels: sim.Module) -> None:
    """An array with indices known at run time only lives in local memory."""
    x = np.random.default_rng(3).integers(0, 5, 32).astype(np.int32)
    y = np.zeros(32, np.int32)
    report = kernels.launch("stack_and_constants", 1, 32, args=[x, y])
    for i in range(32):
        window = [0] * 5
        for k, weight in enumerate((1, 2, 3, 2, 1)):
            window[(k * 3 + x[i]) % 5] = int(x[(i + k) % 32]) * weight
        total = 0
        for k in range(5):
            total = total * 7 + window[(k + x[(i + 1) % 32]) % 5]
        assert y[i] == total
    assert report.bytes_read["local"] > 0


def test_conversions_by_inline_assembly(kernels: sim.Module) -> None:
    """bf16 everywhere; E4M3 and E2M1 where the chip has them; 8-bit registers."""
    x = random(300) * 8
    narrow, wide = np.zeros(300, np.uint16), np.zeros(300, np.float32)
    kernels.launch("to_bf16_and_back", 3, 128, args=[x, narrow, wide, 300])
    np.testing.assert_array_equal(narrow, tables.f32_to_bf16(x))
    np.testing.assert_array_equal(wide, tables.round_to_bf16(x))
    if "to_fp8_and_fp4" not in kernels.entries:
        return
    e4m3, e2m1 = np.zeros(150, np.uint16), np.zeros(150, np.uint8)
    kernels.launch("to_fp8_and_fp4", 2, 128, args=[x, e4m3, e2m1, 300])
    np.testing.assert_array_equal(e4m3.view(np.uint8), tables.round_nearest("e4m3", x))
    codes = tables.round_nearest("e2m1", x)
    np.testing.assert_array_equal(e2m1, codes[::2] | codes[1::2] << 4)


def test_division_square_root_and_wide_integers(kernels: sim.Module) -> None:
    """IEEE division and root of f32 and f64, 64-bit remainders."""
    x, y = random(400) * 100, random(400, 1) + 2
    q, root = np.zeros((2, 400), np.float32)
    d, m = np.zeros(400), np.zeros(400, np.int64)
    kernels.launch("quotients", 4, 128, args=[x, y, q, root, d, m, 400])
    np.testing.assert_array_equal(q, x / y)
    np.testing.assert_array_equal(root, np.sqrt(np.abs(x)))
    np.testing.assert_array_equal(d, x.astype(np.float64) / y)
    a = (x * np.float32(1000)).astype(np.int64)
    b = (y * np.float32(100)).astype(np.int64) + 977
    np.testing.assert_array_equal(m, np.fmod(a, b))


def test_a_failed_assertion_is_reported_with_its_text() -> None:
    """CUDA's assert() calls __assertfail, which no module defines; the others go on."""
    source = """
    extern "C" __device__ void __assertfail(
        const char*, const char*, unsigned, const char*, size_t);
    extern "C" __global__ void positive(const int* x, int* y) {
      const int value = x[threadIdx.x];
      if (value <= 0) __assertfail("value > 0", "kernel.cu", 7, "positive", 1);
      y[threadIdx.x] = value;
    }"""
    module = sim.Machine("100a").load(compile_to_ptx(source, "compute_100a"))
    x, y = np.arange(1, 33, dtype=np.int32), np.zeros(32, np.int32)
    module.launch("positive", 1, 32, args=[x, y])
    np.testing.assert_array_equal(y, x)
    x[5] = 0
    with pytest.raises(sim.SimulationError) as error:
        module.launch("positive", 1, 32, args=[x, y])
    assert error.value.kind == "trap"
    assert "lane 5 found that assert(value > 0) does not hold, kernel.cu line 7" in str(error.value)
