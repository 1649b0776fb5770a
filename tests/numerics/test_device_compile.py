"""NVRTC compiles every header of csrc/numerics for every target architecture.

The kernels include these headers unchanged, so a construct that only a host compiler accepts must
not get in. NVRTC needs no GPU and no driver; it comes from PyPI (`nvidia-cuda-nvrtc-cu12`).
"""

import re

import pytest

from support.nvrtc import compile_with_log
from support.repository import ROOT

HEADERS = sorted((ROOT / "csrc" / "numerics").glob("*.h"))
ARCHITECTURES = ("sm_80", "sm_90", "sm_100a", "sm_103a", "sm_120a")

# A kernel for each header that runs its functions on values the compiler cannot know.
KERNELS = {
    "base.h": """
      out[i] = is_finite(f32_of(in[i])) ? bits_of(minimum(absolute(f32_of(in[i])), kF32Max)) : 0;
      out[i] += static_cast<u32>(ceil_div(in[i], 3) + round_up(in[i], 16));""",
    "minifloat.h": """
      const float x = f32_of(in[i]);
      out[i] = encode_nearest(kE2M1, x) + encode_stochastic(kE4M3, x, in[i] & 0xFF);
      out[i] += bits_of(decode(kE3M2, in[i])) + bits_of(decode_ue4m3(in[i] & 0xFF));
      out[i] += encode_ue8m0_up(x) + bits_of(decode_ue8m0(in[i] & 0xFF));
      out[i] += encode_bf16(x) + encode_f16(x) + bits_of(decode_f16(in[i] & 0xFFFF));""",
    "formats.h": """
      const Format formats[] = {kNVFP4, kMXFP4, kMXFP6E2M3, kMXFP6E3M2, kMXFP8E5M2, kFP8E4M3};
      const Format format = formats[in[i] % 6];
      u8 row[96] = {};
      store_code(format.element, row, in[i] % 64, 5);
      out[i] = load_code(format.element, row, in[i] % 64) + nan_scale(format.scale);
      out[i] += static_cast<u32>(row_bytes(format.element, in[i]));
      out[i] += bits_of(decode_scale(format.scale, in[i] & 0xFF)) + (format == kNVFP4);""",
    "block_scale.h": """
      const float amax = absolute(f32_of(in[i]));
      const Format format = in[i] & 1 ? kNVFP4 : kMXFP6E2M3;
      const TensorScale scale = tensor_scale(format, amax, (in[i] & 2) != 0);
      const ScaleRule rule = in[i] & 4 ? ScaleRule::floor : ScaleRule::rceil;
      const BlockEncoding block = encode_block(format, amax, scale.encode, rule);
      const FourOverSix both = four_over_six_block(amax, scale.encode);
      out[i] = block.scale + bits_of(block.multiplier) + bits_of(scale.global);
      out[i] += both.four.scale + bits_of(four_over_six_error(amax, 3, both.six.scale, amax));""",
    "philox.h": """
      const PhiloxBlock bits = rounding_bits(in[i], static_cast<u64>(i) << 20, 1);
      for (int j = 0; j < 16; ++j) out[i] += bits.byte(j);""",
    "hadamard.h": """
      float x[kHadamardSize];
      for (int j = 0; j < kHadamardSize; ++j) x[j] = f32_of(in[i + j]);
      rotate16(x, kDefaultHadamardSigns);
      for (int j = 0; j < kHadamardSize; ++j) out[i] += bits_of(x[j]);""",
    "mma_descriptor.h": """
      const Element element = static_cast<Element>(in[i] % 5);
      out[i] = descriptor_layout(in[i], Swizzle::span_128b);
      out[i] += descriptor_address(in[i]) + swizzle_128b(in[i]);
      out[i] += instruction_descriptor_fp4(128, in[i] & 0xF8, BlockScale::ue8m0);
      out[i] += instruction_descriptor_mxf8f6f4(256, 64, element, element);
      out[i] += scale_bytes_at(in[i] & 3);""",
    "scale_layout.h": """
      out[i] = static_cast<u32>(scale_offset(ScaleLayout::tiled, in[i], i, in[i]));
      out[i] += static_cast<u32>(scale_bytes(ScaleLayout::tiled, in[i], 8));""",
    "mma_accumulate.h": """
      u8 a[64], b[64], sa[4], sb[4];
      for (int k = 0; k < 64; ++k) a[k] = in[i + k] & 0xF, b[k] = in[i + k] >> 4 & 0xF;
      for (int k = 0; k < 4; ++k) sa[k] = in[i + k] & 0xFF, sb[k] = in[i + k] >> 8 & 0xFF;
      out[i] = mma_fp4_step(a, b, BlockScale::ue4m3, sa, sb, in[i]);
      out[i] += mma_fp8_step(Element::e5m2, a, sa[0], Element::e2m3, b, sb[0], in[i]);""",
    "mma_sum.h": """
      ExactSum sum;
      sum.add(static_cast<int>(in[i]), -20);
      MmaTerm terms[2] = {{5, -3, -3}, {static_cast<int>(in[i]), -30, -30}};
      out[i] = sum.round(kMmaF16) + mma_add_otherwise(terms, 2, MmaSum::f32_chain, kMmaF32);""",
    "mma_plain.h": """
      MmaNumber a[32], b[32];
      for (int k = 0; k < 32; ++k) a[k] = mma_number(kMmaBF16, in[i + k] & 0xFFFF);
      for (int k = 0; k < 32; ++k) b[k] = mma_number(kMmaTF32, in[i + k] >> 13);
      out[i] = mma_plain(a, b, 32, in[i], mma_core(100, 16, false));
      out[i] += mma_fp8_by_f16(a, b, 32, in[i] & 0xFFFF, mma_core(100, 16, true));""",
}


def source(*headers: str) -> str:
    """A translation unit that includes the headers and has one kernel for each."""
    includes = "".join(f'#include "numerics/{header}"\n' for header in headers)
    kernels = "".join(
        f"""
extern "C" __global__ void {kernel_name(header)}(const u32* in, u32* out) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
{KERNELS[header]}
}}
"""
        for header in headers
    )
    return f"{includes}using namespace jax_fp4;\n{kernels}"


def kernel_name(header: str) -> str:
    return f"probe_{header.removesuffix('.h')}"


def test_every_header_has_a_kernel() -> None:
    """A header added to csrc/numerics needs a kernel here."""
    assert {header.name for header in HEADERS} == set(KERNELS)


def require_clean(ptx: str, log: str, headers: tuple[str, ...], architecture: str) -> None:
    """No error, no warning, and every kernel is in the PTX and stores something."""
    assert ptx, log
    assert log.strip() == ""
    assert f".target {architecture}" in ptx
    bodies = dict(re.findall(r"\.visible \.entry (\w+)\((.*?)\n}", ptx, re.DOTALL))
    assert set(bodies) == {kernel_name(header) for header in headers}
    assert all("st.global" in body for body in bodies.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_headers_compile_for_the_device(architecture: str) -> None:
    """Every function of every header compiles for this architecture, without a warning."""
    headers = tuple(KERNELS)
    require_clean(*compile_with_log(source(*headers), architecture), headers, architecture)


@pytest.mark.parametrize("header", KERNELS)
def test_header_includes_what_it_uses(header: str) -> None:
    """Each header compiles as the only one of a translation unit."""
    require_clean(*compile_with_log(source(header), "sm_100a"), (header,), "sm_100a")


@pytest.mark.parametrize("header", ["block_scale.h", "hadamard.h"])
def test_device_arithmetic_is_ieee(header: str) -> None:
    """No fused, flushed or approximate f32 operation in the PTX; every one names its rounding."""
    ptx, _ = compile_with_log(source(header), "sm_100a")
    arithmetic = re.findall(r"\b(?:add|sub|mul|div|fma|rcp)(?:\.\w+)*\.f32\b", ptx)
    assert arithmetic
    assert set(arithmetic) <= {f"{op}.rn.f32" for op in ("add", "sub", "mul", "div", "rcp")}


def test_compile_check_detects_a_planted_host_construct() -> None:
    """A header that needs the host's standard library does not compile."""
    ptx, log = compile_with_log("#include <vector>\n" + source("base.h"), "sm_90")
    assert not ptx
    assert "vector" in log
