// csrc/driver/launch.h and csrc/plan as C functions for tests/kernels/test_launcher.py.
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "driver/launch.h"
#include "plan/gemm.h"
#include "plan/quantize.h"

using namespace jax_fp4;

namespace {

cuda::Driver driver;
std::deque<std::string> names;
std::vector<ImageEntry> entries;
std::vector<unsigned char> data;
std::unique_ptr<cuda::Launcher> launcher;

template <class Body>
const char* guarded(const Body& body) {
  static thread_local std::string what;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    what = error.what();
    return what.c_str();
  }
}

}  // namespace

extern "C" void add_image(const char* kernel, const char* target, int cubin, const char* bytes,
                          std::size_t count) {
  const std::size_t offset = data.size();
  data.insert(data.end(), bytes, bytes + count);
  entries.push_back({names.emplace_back(kernel).c_str(), names.emplace_back(target).c_str(),
                     cubin ? ImageKind::cubin : ImageKind::ptx, offset, count});
}

// A launcher without memory of the one before.
extern "C" const char* start(const char* library) {
  return guarded([&] {
    driver = cuda::load_driver(library);
    if (!driver.problem.empty()) throw std::runtime_error(driver.problem);
    launcher = std::make_unique<cuda::Launcher>(
        driver.api, ImageTable{entries.data(), entries.size(), data.data()});
  });
}

extern "C" const char* load(cuda::CUstream stream, const char* prefix) {
  return guarded([&] { launcher->load(stream, prefix); });
}

// amax of x f32 [rows, cols].
extern "C" const char* run_amax(cuda::CUstream stream, const float* x, const u32* origin, u32* amax,
                                u32 rows, u32 cols) {
  return guarded([&] {
    AmaxParams p{};
    p.x = x;
    p.origin = origin;
    p.logical_rows = p.rows = rows;
    p.logical_cols = p.cols = cols;
    p.leads = p.matrices = 1;
    p.input = InputType::f32;
    p.amax = amax;
    launcher->run(stream, plan::amax(p, false, launcher->chip(stream)));
  });
}

// D f32 [m, n] of MXFP4 operands with tiled scales.
extern "C" const char* run_product(cuda::CUstream stream, const u8* a, const u8* scales_a,
                                   const u8* b, const u8* scales_b, const float* one, float* d,
                                   u32 m, u32 n, u32 k) {
  return guarded([&] {
    plan::GemmShape shape;
    shape.m = m;
    shape.n = n;
    shape.k = k;
    shape.a.format = shape.b.format = kMXFP4;
    plan::GemmArrays arrays{{a, scales_a, one}, {b, scales_b, one}};
    arrays.out = d;
    const auto plan = plan::plan_gemm(shape, launcher->chip(stream), 0);
    launcher->run(stream, plan::gemm_steps(plan, shape, arrays));
  });
}

// Whether a kernel is among those that are loaded for a chip before products are captured.
extern "C" int loaded_for(int chip, const char* kernel) {
  for (const std::string& prefix : plan::gemm_kernels({chip, 1}))
    if (std::string(kernel).compare(0, prefix.size(), prefix) == 0) return 1;
  return 0;
}

extern "C" int fits(const char* target, int cubin, int chip) {
  return cuda::image_fits({"", target, cubin ? ImageKind::cubin : ImageKind::ptx, 0, 0}, chip);
}

extern "C" int better(const char* a, int a_cubin, const char* b, int b_cubin) {
  const auto image = [](const char* target, int cubin) {
    return ImageEntry{"", target, cubin ? ImageKind::cubin : ImageKind::ptx, 0, 0};
  };
  return cuda::image_better(image(a, a_cubin), image(b, b_cubin));
}
