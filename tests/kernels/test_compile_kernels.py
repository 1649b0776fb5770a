"""The device build: chips, refusals, determinism, and what params.h looks like from the host."""

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import device_kernels as device
from support.native import shared_library
from support.repository import ROOT


@pytest.fixture(autouse=True)
def _tools() -> None:
    device.require_tools()


def test_chips_are_read_in_every_spelling() -> None:
    """In the order of the table, each once."""
    parse = device.compiler().parse_archs
    assert parse("sm_103a; 8.0,10.0a 103a") == ["100a", "103a", "80"]
    assert parse("all") == parse("") == list(device.compiler().ARCHS)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("103a,bogus", "bogus"),
        ("120", "120 (has no FP4 instructions as such a target; write 120a)"),
        ("10.0;12.1", "12.1 (has no FP4 instructions as such a target; write 121a)"),
        ("90a", "90a"),
    ],
)
def test_wrong_chips_are_named(text: str, named: str) -> None:
    """No entry is dropped silently."""
    with pytest.raises(device.compiler().CompileError, match=re.escape(named)):
        device.compiler().parse_archs(text)


PTX = """.version 8.8
.target sm_100f
.address_size 64
.visible .entry k(.param .u64 p)
{{
  .reg .f32 %f<3>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [p];
  ld.global.f32 %f1, [%rd1];
  {line}
  st.global.f32 [%rd1], %f2;
  ret;
}}
"""


@pytest.mark.parametrize(
    "line",
    ["mul.f32 %f2, %f1, %f1;", "add.sat.f32 %f2, %f1, %f1;", "mul.rn.ftz.f32 %f2, %f1, %f1;"],
)
def test_open_rounding_is_refused(line: str) -> None:
    """ptxas could fuse it; the line is named."""
    compiler = device.compiler()
    compiler.check_rounding("k", PTX.format(line="mul.rn.f32 %f2, %f1, %f1;"))
    with pytest.raises(compiler.CompileError, match="PTX line 10: '" + re.escape(line)):
        compiler.check_rounding("k", PTX.format(line=line))


def test_spills_are_refused() -> None:
    """A kernel with more live values than its launch bounds leave registers for."""
    text = """extern "C" __global__ void __launch_bounds__(1024, 2) JAX_FP4_KERNEL(float* x) {
      float v[64];
      for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      for (int i = 0; i < 64; ++i) x[(63 - i) * 1024 + threadIdx.x] = v[i];
    }"""
    compiler = device.compiler()
    kernel = compiler.Kernel("spilling", "quantize.cu", (), ("80",))
    ptx = compiler.compile_ptx(kernel, "80", text)
    with pytest.raises(compiler.CompileError, match="spilling on sm_80 spills"):
        compiler.assemble("spilling", ptx, "80")


def test_images_report_and_determinism(tmp_path: Path) -> None:
    """One kernel for three chips, twice in different folders: the same bytes; a table that fits."""
    archs = ["100a", "103a", "80"]
    for name in ("one", "two"):
        # In a process of its own, as in a build: it forks, which a process with JAX in it must not.
        script = (
            "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import compile_kernels as c; "
            "c.build(pathlib.Path(sys.argv[2]), sys.argv[3:], 2, "
            "[k for k in c.kernels() if k.name == 'dequantize_4'])"
        )
        folder = ROOT / "csrc" / "compile"
        subprocess.run(
            [sys.executable, "-B", "-c", script, folder, tmp_path / name, *archs], check=True
        )
    blobs = [(tmp_path / name / "images.bin").read_bytes() for name in ("one", "two")]
    assert blobs[0] == blobs[1]
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert [(r["kernel"], r["arch"], r["spill_bytes"]) for r in report] == [
        ("dequantize_4", arch, 0) for arch in archs
    ]
    assert "registers" in (tmp_path / "one" / "report.txt").read_text()
    table = re.findall(
        r'\{"(\w+)", "(\w+)", ImageKind::(\w+), (\d+), (\d+)\}',
        (tmp_path / "one" / "images.cc").read_text(),
    )
    assert [row[:3] for row in table] == [
        ("dequantize_4", "100f", "ptx"), ("dequantize_4", "100a", "cubin"),
        ("dequantize_4", "103a", "cubin"), ("dequantize_4", "80", "ptx"),
        ("dequantize_4", "80", "cubin"),
    ]  # fmt: skip
    for _, target, kind, offset, count in table:
        image = blobs[0][int(offset) : int(offset) + int(count)]
        if kind == "ptx":
            assert f".target sm_{target}".encode() in image and image.endswith(b"\0")
        else:
            assert image.startswith(b"\x7fELF")


def test_every_variant_is_launched_by_these_tests() -> None:
    """The names that the tests ask for are the rows of variants.def."""
    quantize = {
        device.quantize_kernel(name, bits, four_over_six=best)
        for name in device.cpu.FORMATS
        for bits in (16, 32)
        for best in (False, True)
    }
    amax = {
        f"amax_{kind}{bits}" for kind in ("", "rotated_cols_", "rotated_rows_") for bits in (16, 32)
    }
    decode = {f"dequantize_{bits}" for bits in (4, 6, 8)}
    ours = {"quantize.cu", "amax.cu", "dequantize.cu"}
    rows = {k.name for k in device.compiler().kernels() if k.source in ours}
    assert rows == quantize | amax | decode


def test_a_missing_compiler_is_told_apart() -> None:
    """Exit status 3 and a sentence that names the package: the build goes on without kernels."""
    script = ROOT / "csrc" / "compile" / "compile_kernels.py"
    run = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 3
    assert "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'" in run.stderr


PARAMS_C = """
#include <cstddef>
#include "kernels/params.h"
using namespace jax_fp4;
extern "C" unsigned long c_sizes(int i) {
  const unsigned long sizes[] = {
      sizeof(CopyParams), offsetof(CopyParams, layout), sizeof(QuantizeParams),
      offsetof(QuantizeParams, col), sizeof(AmaxParams), offsetof(AmaxParams, fingerprint),
      sizeof(DequantizeParams), offsetof(DequantizeParams, output)};
  return sizes[i];
}
"""


def test_parameters_have_one_layout(tmp_path: Path) -> None:
    """The structures that the tests pack are those that g++ and NVRTC see."""
    source = tmp_path / "params_c.cc"
    source.write_text(PARAMS_C)
    library = shared_library("params", [source])
    library.c_sizes.restype = ctypes.c_ulong
    d = device
    want = [
        ctypes.sizeof(d.CopyParams), d.CopyParams.layout.offset, ctypes.sizeof(d.QuantizeParams),
        d.QuantizeParams.col.offset, ctypes.sizeof(d.AmaxParams), d.AmaxParams.fingerprint.offset,
        ctypes.sizeof(d.DequantizeParams), d.DequantizeParams.output.offset,
    ]  # fmt: skip
    assert [library.c_sizes(i) for i in range(len(want))] == want
    for name, params in (("quantize_nvfp4_32", d.QuantizeParams), ("amax_32", d.AmaxParams)):
        size = re.search(r"\.param \.align 8 \.b8 \w+\[(\d+)\]", d.ptx(name, "100f"))
        assert size is not None and int(size[1]) == ctypes.sizeof(params)
