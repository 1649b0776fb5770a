"""csrc/numerics compiled for the device and executed: the same bits as the oracles.

This is the device code of the project before there are kernels.
"""

import numpy as np
import pytest

from jax_fp4 import sim
from oracles import quantizer, tables
from support.nvrtc import compile_to_ptx

SOURCE = r"""
#include "numerics/hadamard.h"
#include "numerics/block_scale.h"
#include "numerics/philox.h"
#include "numerics/scale_layout.h"
using namespace jax_fp4;
#define INDEX const int i = blockIdx.x * blockDim.x + threadIdx.x
extern "C" __global__ void encode(const float* x, const u8* random, u8* nearest,
                                  u8* stochastic, u8* up, u16* bf16, u16* f16, int n) {
  INDEX;
  if (i >= n) return;
  const Minifloat kinds[] = {kE2M1, kE2M3, kE3M2, kE4M3, kE5M2};
  for (int k = 0; k < 5; ++k) {
    nearest[k * n + i] = encode_nearest(kinds[k], x[i]);
    stochastic[k * n + i] = encode_stochastic(kinds[k], x[i], random[i]);
  }
  up[i] = encode_ue8m0_up(absolute(x[i]));
  bf16[i] = encode_bf16(x[i]);
  f16[i] = encode_f16(x[i]);
}
extern "C" __global__ void decode_all(float* values, float* f16) {
  INDEX;
  const Minifloat kinds[] = {kE2M1, kE2M3, kE3M2, kE4M3, kE5M2};
  if (i < 256) {
    for (int k = 0; k < 5; ++k)
      values[k * 256 + i] = decode(kinds[k], i & (2 * kinds[k].sign_code() - 1));
    values[5 * 256 + i] = decode_ue4m3(i);
    values[6 * 256 + i] = decode_ue8m0(i);
  }
  f16[i] = decode_f16(i);
}
extern "C" __global__ void philox(u32 low, u32 high, u32 stream, u64 first, uint4* out) {
  INDEX;
  const PhiloxBlock b = rounding_bits(u64{high} << 32 | low, first + i, stream);
  out[i] = make_uint4(b.word[0], b.word[1], b.word[2], b.word[3]);
}
extern "C" __global__ void rotate(const float* x, float* y) {
  INDEX;
  float row[16];
  for (int j = 0; j < 16; ++j) row[j] = x[16 * i + j];
  rotate16(row, kDefaultHadamardSigns);
  for (int j = 0; j < 16; ++j) y[16 * i + j] = row[j];
}
// One thread for each block of 16 along a row; K is a multiple of 16.
extern "C" __global__ void nvfp4(const float* x, float amax, u32 low, u32 high, int stochastic,
                                 u8* codes, u8* scales, float* global, int blocks) {
  INDEX;
  if (i >= blocks) return;
  const TensorScale tensor = tensor_scale(kNVFP4, amax);
  float largest = 0;
  bool bad = false;
  for (int j = 0; j < 16; ++j) {
    const float value = x[16 * i + j];
    bad |= !is_finite(value);
    largest = absolute(value) > largest ? absolute(value) : largest;
  }
  const BlockEncoding block =
      encode_block(kNVFP4, bad ? 0.0f : largest, tensor.encode, ScaleRule::rceil);
  scales[i] = bad ? nan_scale(kNVFP4.scale) : block.scale;
  const PhiloxBlock random = rounding_bits(u64{high} << 32 | low, i, 0);
  for (int j = 0; j < 16; j += 2) {
    u32 pair = 0;
    for (int k = 0; k < 2; ++k) {
      const float y = x[16 * i + j + k] * block.multiplier;
      const u32 code =
          stochastic ? encode_stochastic(kE2M1, y, random.byte(j + k)) : encode_nearest(kE2M1, y);
      pair |= (bad ? 0 : code) << (4 * k);
    }
    codes[8 * i + j / 2] = pair;
  }
  if (i == 0) *global = tensor.global;
}
extern "C" __global__ void mx(const float* x, int rule, u8* scales, float* multipliers, int n) {
  INDEX;
  if (i >= n) return;
  const Format formats[] = {kMXFP4, kMXFP6E2M3, kMXFP6E3M2, kMXFP8E4M3, kMXFP8E5M2};
  for (int k = 0; k < 5; ++k) {
    const BlockEncoding block =
        encode_block(formats[k], absolute(x[i]), 1.0f, static_cast<ScaleRule>(rule));
    scales[k * n + i] = block.scale;
    multipliers[k * n + i] = block.multiplier;
  }
}
"""

KINDS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


@pytest.fixture(scope="module", params=["sm_100a", "sm_80"])
def device(request: pytest.FixtureRequest) -> sim.Module:
    return sim.Machine(request.param.removeprefix("sm_")).load(
        compile_to_ptx(SOURCE, request.param)
    )


def numbers(n: int, seed: int = 0) -> np.ndarray:
    """Midpoints and codes of every format with their neighbours, and numbers of every size."""
    rng = np.random.default_rng(seed)
    parts = [np.array([0, -0.0, 1e-40, -1e-45, 3e38], np.float32)]
    for kind in KINDS:
        for grid in (tables.MAGNITUDES[kind], tables.MIDPOINTS[kind]):
            parts += [
                grid,
                -grid,
                np.nextafter(grid, np.float32(np.inf)),
                np.nextafter(grid, np.float32(0)),
            ]
    parts.append((rng.standard_normal(n) * np.exp2(rng.integers(-20, 18, n))).astype(np.float32))
    return np.concatenate(parts).astype(np.float32)


def test_encoders(device: sim.Module) -> None:
    """Nearest and stochastic rounding to every element kind, UE8M0, bf16, f16."""
    x = numbers(500)
    n = x.size
    random = np.random.default_rng(1).integers(0, 256, n).astype(np.uint8)
    nearest, stochastic = np.zeros((2, 5, n), np.uint8)
    up, bf16, f16 = np.zeros(n, np.uint8), np.zeros(n, np.uint16), np.zeros(n, np.uint16)
    device.launch(
        "encode", -(-n // 128), 128, args=[x, random, nearest, stochastic, up, bf16, f16, n]
    )
    for k, kind in enumerate(KINDS):
        np.testing.assert_array_equal(nearest[k], tables.round_nearest(kind, x))
        np.testing.assert_array_equal(stochastic[k], tables.round_stochastic(kind, x, random))
    grid = np.ldexp(1.0, np.arange(-127, 128))
    np.testing.assert_array_equal(
        up, np.minimum(np.searchsorted(grid, np.abs(x).astype(np.float64)), 254)
    )
    np.testing.assert_array_equal(bf16, tables.f32_to_bf16(x))
    np.testing.assert_array_equal(f16, tables.f32_to_f16(x))


def test_decoders_exhaustively(device: sim.Module) -> None:
    """Every code of every 8-bit kind and every f16."""
    values, f16 = np.zeros((7, 256), np.float32), np.zeros(1 << 16, np.float32)
    device.launch("decode_all", 256, 256, args=[values, f16])
    for k, kind in enumerate((*KINDS, "ue4m3", "ue8m0")):
        table = tables.VALUES[kind].astype(np.float32)
        np.testing.assert_array_equal(values[k], np.resize(table, 256))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(
            f16, tables.f16_to_f32(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16))
        )


def test_philox(device: sim.Module) -> None:
    """Ten rounds, with group numbers beyond 32 bits."""
    out = np.zeros((256, 4), np.uint32)
    first = (1 << 32) - 100
    device.launch("philox", 2, 128, args=[123, 0xDEADBEEF, 3, first, out])
    groups = np.arange(first, first + 256, dtype=np.uint64)
    np.testing.assert_array_equal(
        out.view(np.uint8), quantizer.random_bytes(groups, (123, 0xDEADBEEF), 3)
    )


def test_hadamard_rotation(device: sim.Module) -> None:
    """Butterflies in f32, rounded to bf16."""
    x = (np.random.default_rng(4).standard_normal((128, 16)) * 100).astype(np.float32)
    y = np.zeros_like(x)
    device.launch("rotate", 1, 128, args=[x, y])
    np.testing.assert_array_equal(y, quantizer.rotate(x))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nvfp4_quantizer_chain(device: sim.Module, rounding: str) -> None:
    """Scales, codes, global scale of the whole chain; bad blocks, zero blocks, subnormals."""
    x = (
        np.random.default_rng(6).standard_normal((64, 64))
        * np.exp2(np.random.default_rng(7).integers(-30, 10, (64, 1)))
    ).astype(np.float32)
    x[3, 5], x[4, 20], x[5, :16], x[6, :16] = np.nan, -np.inf, 0, 1e-42
    want = quantizer.quantize(x, "NVFP4", rounding=rounding, seed=(11, 22))
    codes, scales, scale = (
        np.zeros((64, 32), np.uint8),
        np.zeros((64, 4), np.uint8),
        np.zeros(1, np.float32),
    )
    amax = float(quantizer.finite_amax(x))
    device.launch(
        "nvfp4",
        2,
        128,
        args=[x, amax, 11, 22, int(rounding == "stochastic"), codes, scales, scale, 256],
    )
    np.testing.assert_array_equal(scales, want.scales)
    np.testing.assert_array_equal(codes, want.codes[:, ::2] | want.codes[:, 1::2] << 4)
    assert scale[0] == want.global_scale


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_mx_scales(device: sim.Module, rule: str) -> None:
    """UE8M0 scales and their multipliers for every MX format."""
    x = numbers(300, seed=9)
    n = x.size
    scales, multipliers = np.zeros((5, n), np.uint8), np.zeros((5, n), np.float32)
    device.launch(
        "mx", -(-n // 128), 128, args=[x, ["rceil", "floor"].index(rule), scales, multipliers, n]
    )
    for k, name in enumerate(("MXFP4", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP8_E4M3", "MXFP8_E5M2")):
        block = np.zeros((n, 32), np.float32)
        block[:, 0] = x
        want = quantizer.quantize(block, name, scale_rule=rule).scales[:, 0]
        np.testing.assert_array_equal(scales[k], want)
        np.testing.assert_array_equal(
            multipliers[k], np.ldexp(np.float32(1), 127 - want.astype(int))
        )
