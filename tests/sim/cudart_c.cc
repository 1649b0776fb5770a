// A program as nvcc leaves it, written by hand: start-up code that registers a fat binary, stubs, and a main
// that computes with the CUDA runtime. tests/sim/test_cudart.py links it with the stand-in runtime.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int number;
    unsigned dims[3];
  } value;
};
struct LaunchConfig {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  void* stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  unsigned attribute_count = 0;
};

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFatBinaryEnd(void**);
void __cudaUnregisterFatBinary(void**);
char __cudaInitModule(void**);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                            void*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int);
unsigned __cudaPushCallConfiguration(dim3, dim3, std::size_t, void*);
int __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*);
int __cudaGetKernel(const void**, const void*);
int __cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, void*);
int cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, void*);
int cudaLaunchKernelExC(const LaunchConfig*, const void*, void**);
int cudaFuncSetAttribute(const void*, int, int);
int cudaFuncGetAttributes(void*, const void*);
int cudaOccupancyMaxActiveClusters(int*, const void*, const LaunchConfig*);
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int*, const void*, int, std::size_t);
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int*, const void*, int, std::size_t,
                                                           unsigned);
int cudaGetDeviceCount(int*);
int cudaGetDevice(int*);
int cudaSetDevice(int);
int cudaDeviceGetAttribute(int*, int, int);
int cudaGetDeviceProperties(void*, int);
int cudaGetDeviceProperties_v2(void*, int);
int cudaDeviceSynchronize();
int cudaDriverGetVersion(int*);
int cudaRuntimeGetVersion(int*);
int cudaGetLastError();
int cudaPeekAtLastError();
const char* cudaGetErrorName(int);
const char* cudaGetErrorString(int);
int cudaGetDriverEntryPoint(const char*, void**, unsigned long long, int*);
int cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long, int*);
int cudaMalloc(void**, std::size_t);
int cudaFree(void*);
int cudaMallocHost(void**, std::size_t);
int cudaFreeHost(void*);
int cudaMemcpy(void*, const void*, std::size_t, int);
int cudaMemcpyAsync(void*, const void*, std::size_t, int, void*);
int cudaMemset(void*, int, std::size_t);
int cudaMemsetAsync(void*, int, std::size_t, void*);
int cudaGetSymbolAddress(void**, const void*);
int cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, int);
int cudaMemcpyFromSymbol(void*, const void*, std::size_t, std::size_t, int);
int cudaStreamCreate(void**);
int cudaStreamCreateWithFlags(void**, unsigned);
int cudaStreamCreateWithPriority(void**, unsigned, int);
int cudaStreamDestroy(void*);
int cudaStreamSynchronize(void*);
int cudaStreamQuery(void*);
int cudaStreamWaitEvent(void*, void*, unsigned);
int cudaStreamIsCapturing(void*, int*);
int cudaEventCreate(void**);
int cudaEventCreateWithFlags(void**, unsigned);
int cudaEventDestroy(void*);
int cudaEventRecord(void*, void*);
int cudaEventSynchronize(void*);
int cudaEventQuery(void*);
int cudaEventElapsedTime(float*, void*, void*);
}

namespace {

const char kPtx[] = R"(.version 8.8
.target sm_100a
.address_size 64
.global .align 4 .u32 counter = 7;
.visible .entry add(.param .u64 x, .param .u64 y)
{
  .reg .b32 r, s; .reg .b64 a, b, o;
  mov.u32 r, %tid.x;
  mul.wide.u32 o, r, 4;
  ld.param.u64 a, [x];
  ld.param.u64 b, [y];
  add.u64 a, a, o;
  add.u64 b, b, o;
  ld.global.u32 r, [a];
  ld.global.u32 s, [b];
  add.u32 s, r, s;
  st.global.u32 [b], s;
  ret;
}
.visible .entry fail() { trap; }
.visible .entry count()
{
  .reg .b32 r;
  mov.u32 r, %cluster_nctaid.x;
  atom.global.add.u32 r, [counter], r;
  ret;
}
)";

// The layout is that of tests/sim/test_cuda_image.py.
std::vector<char> make_fatbin() {
  std::string text(kPtx);
  text.resize((text.size() / 8 + 1) * 8);
  std::vector<char> image(16 + 80, 0);
  const auto put = [&](std::size_t at, auto value) {
    std::memcpy(image.data() + at, &value, sizeof value);
  };
  put(0, std::uint32_t{0xBA55ED50});
  put(4, std::uint16_t{1});
  put(6, std::uint16_t{16});
  put(8, std::uint64_t{80 + text.size()});
  put(16, std::uint16_t{1});
  put(20, std::uint32_t{80});
  put(24, std::uint64_t{text.size()});
  put(44, std::uint32_t{100});
  image.insert(image.end(), text.begin(), text.end());
  return image;
}

struct Wrapper {
  std::uint32_t magic, version;
  const char* data;
  const char* name;
};

// Stubs: their addresses name the kernels, and the call takes the configuration that was pushed.
void add(void* x, void* y) {
  void* arguments[] = {&x, &y};
  dim3 grid, block;
  std::size_t shared;
  void* stream;
  if (__cudaPopCallConfiguration(&grid, &block, &shared, &stream) != 0) return;
  cudaLaunchKernel(reinterpret_cast<const void*>(&add), grid, block, arguments, shared, stream);
}
void fail() {}
void count() {}
char counter[4];
char stray;

int failures = 0;
void expect(bool right, int line) {
  if (right) return;
  std::printf("line %d is wrong\n", line);
  ++failures;
}

}  // namespace

#define EXPECT(condition) expect(condition, __LINE__)

int main() {
  const std::vector<char> fatbin = make_fatbin();
  Wrapper wrapper = {0x466243B1, 1, fatbin.data(), nullptr};
  void** binary = __cudaRegisterFatBinary(&wrapper);
  const auto register_kernel = [&](auto* stub, const char* name) {
    __cudaRegisterFunction(binary, reinterpret_cast<const char*>(stub), nullptr, name, -1, nullptr,
                           nullptr, nullptr, nullptr, nullptr);
    return reinterpret_cast<const void*>(stub);
  };
  const void* add_kernel = register_kernel(&add, "add");
  const void* fail_kernel = register_kernel(&fail, "fail");
  const void* count_kernel = register_kernel(&count, "count");
  __cudaRegisterVar(binary, counter, nullptr, "counter", 0, 4, 0, 0);
  __cudaRegisterFatBinaryEnd(binary);
  EXPECT(__cudaInitModule(binary) == 1);

  int number = 0;
  EXPECT(cudaGetDeviceCount(&number) == 0 && number == 2);
  EXPECT(cudaGetDevice(&number) == 0 && number == 0);
  EXPECT(cudaSetDevice(2) == 101 && cudaGetLastError() == 101 && cudaGetLastError() == 0);
  EXPECT(cudaSetDevice(1) == 0 && cudaGetDevice(&number) == 0 && number == 1);
  EXPECT(cudaDeviceGetAttribute(&number, 75, 1) == 0 && number == 10);
  EXPECT(cudaDeviceGetAttribute(&number, 76, 1) == 0 && number == 3);
  EXPECT(cudaSetDevice(0) == 0);
  int version = 0;
  EXPECT(cudaDriverGetVersion(&number) == 0 && cudaRuntimeGetVersion(&version) == 0);
  EXPECT(number == version && number >= 12000);

  // Memory, every direction, and the three ways to launch.
  std::vector<std::uint32_t> x(64), y(64), out(64);
  for (unsigned i = 0; i < 64; ++i) x[i] = i * i, y[i] = 1000 * i;
  void *dx = nullptr, *dy = nullptr, *stream = nullptr, *pinned = nullptr;
  EXPECT(cudaMalloc(&dx, 256) == 0 && cudaMalloc(&dy, 256) == 0);
  EXPECT(cudaStreamCreateWithFlags(&stream, 1) == 0);
  EXPECT(cudaMallocHost(&pinned, 256) == 0);
  EXPECT(cudaMemcpy(pinned, x.data(), 256, 0) == 0);
  EXPECT(cudaMemcpyAsync(dx, pinned, 256, 1, stream) == 0);
  EXPECT(cudaMemcpy(dy, y.data(), 256, 4) == 0);
  EXPECT(__cudaPushCallConfiguration(dim3{}, dim3{64, 1, 1}, 0, stream) == 0);
  add(dx, dy);
  void* arguments[] = {&dx, &dy};
  LaunchConfig config;
  config.block.x = 64;
  config.stream = stream;
  EXPECT(cudaLaunchKernelExC(&config, add_kernel, arguments) == 0);
  const void* kernel = nullptr;
  EXPECT(__cudaGetKernel(&kernel, add_kernel) == 0);
  EXPECT(__cudaLaunchKernel(kernel, dim3{}, dim3{64, 1, 1}, arguments, 0, stream) == 0);
  EXPECT(cudaStreamSynchronize(stream) == 0 && cudaStreamQuery(stream) == 0);
  EXPECT(cudaMemcpy(out.data(), dy, 256, 2) == 0);
  for (unsigned i = 0; i < 64; ++i) EXPECT(out[i] == y[i] + 3 * x[i]);
  EXPECT(cudaMemcpy(dx, dy, 256, 4) == 0 && cudaMemcpy(out.data(), dx, 256, 4) == 0);
  EXPECT(out[3] == y[3] + 3 * x[3]);
  EXPECT(cudaMemcpy(dx, dy, 256, 3) == 0 && cudaMemcpy(out.data(), y.data(), 256, 4) == 0);
  EXPECT(out[3] == y[3]);
  EXPECT(cudaMemset(dx, 1, 256) == 0 && cudaMemsetAsync(dx, 2, 4, stream) == 0);
  EXPECT(cudaMemcpy(out.data(), dx, 256, 2) == 0 && out[0] == 0x02020202 && out[1] == 0x01010101);
  EXPECT(cudaMemcpy(dx, dy, 256, 5) == 21 && cudaPeekAtLastError() == 21);
  EXPECT(cudaGetLastError() == 21 && cudaPeekAtLastError() == 0);
  EXPECT(cudaMemcpy(dx, x.data(), 257, 1) == 1 && cudaMemcpy(dx, nullptr, 1, 4) == 1);
  EXPECT(cudaMalloc(&pinned, std::size_t{1} << 50) == 2);

  // Attributes, clusters and variables.
  LaunchAttribute attribute = {4, {}, {}};
  attribute.value.dims[0] = 2, attribute.value.dims[1] = attribute.value.dims[2] = 1;
  config.grid.x = 4;
  config.block.x = 1;
  config.attributes = &attribute;
  config.attribute_count = 1;
  EXPECT(cudaLaunchKernelExC(&config, count_kernel, nullptr) == 0);
  EXPECT(cudaStreamSynchronize(stream) == 0);
  std::uint32_t counted = 0;
  EXPECT(cudaMemcpyFromSymbol(&counted, counter, 4, 0, 2) == 0 && counted == 7 + 4 * 2);
  counted = 100;
  EXPECT(cudaMemcpyToSymbol(counter, &counted, 4, 0, 1) == 0);
  void* place = nullptr;
  EXPECT(cudaGetSymbolAddress(&place, counter) == 0);
  counted = 0;
  EXPECT(cudaMemcpy(&counted, place, 4, 4) == 0 && counted == 100);
  EXPECT(cudaGetSymbolAddress(&place, &stray) == 13);
  EXPECT(cudaLaunchKernel(&stray, dim3{}, dim3{}, nullptr, 0, nullptr) == 98);
  EXPECT(cudaOccupancyMaxActiveClusters(&number, count_kernel, &config) == 0 && number == 32);
  EXPECT(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&number, add_kernel, 1024, 0) == 0);
  EXPECT(number == 2);
  EXPECT(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&number, add_kernel, 64, 0, 0) ==
         0);
  EXPECT(number == 4);
  config = LaunchConfig{};
  config.shared_bytes = 100000;
  EXPECT(cudaLaunchKernelExC(&config, add_kernel, arguments) == 1);
  EXPECT(cudaFuncSetAttribute(add_kernel, 8, 100000) == 0);
  EXPECT(cudaFuncSetAttribute(add_kernel, 8, 300000) == 1);
  EXPECT(cudaLaunchKernelExC(&config, add_kernel, arguments) == 0);
  int about[36] = {};
  EXPECT(cudaFuncGetAttributes(about, add_kernel) == 0);
  EXPECT(about[0] == 0 && about[6] == 1024 && about[8] == 100 && about[11] == 100000);
  EXPECT(cudaLaunchKernelExC(nullptr, add_kernel, arguments) == 1);
  EXPECT(cudaDeviceSynchronize() == 0);

  // Properties: the structures of CUDA 12 and 13 differ.
  std::vector<char> properties(2048, 'x');
  const auto read_int = [&](std::size_t at) {
    int value;
    std::memcpy(&value, properties.data() + at, 4);
    return value;
  };
  EXPECT(cudaGetDeviceProperties_v2(properties.data(), 1) == 0);
  EXPECT(std::strcmp(properties.data(), "PTX machine sm_103a") == 0);
  EXPECT(read_int(360) == 10 && read_int(364) == 3 && read_int(388) == 16 &&
         read_int(696) == 232448);
  EXPECT(properties[1031] == 0 && properties[1032] == 'x');
  properties.assign(2048, 'x');
  EXPECT(cudaGetDeviceProperties(properties.data(), 0) == 0);
  EXPECT(read_int(360) == 10 && read_int(364) == 0 && read_int(384) == 16 &&
         read_int(672) == 232448);
  EXPECT(properties[1007] == 0 && properties[1008] == 'x');

  // Events, streams, the driver's functions, texts.
  void *first = nullptr, *last = nullptr, *other = nullptr;
  float milliseconds = -1;
  EXPECT(cudaEventCreate(&first) == 0 && cudaEventCreateWithFlags(&last, 0) == 0);
  EXPECT(cudaEventElapsedTime(&milliseconds, first, last) == 400);
  EXPECT(cudaEventRecord(first, stream) == 0 && cudaEventRecord(last, stream) == 0);
  EXPECT(cudaEventElapsedTime(&milliseconds, first, last) == 0 && milliseconds >= 0);
  EXPECT(cudaStreamCreate(&other) == 0 && cudaStreamWaitEvent(other, last, 0) == 0);
  EXPECT(cudaEventSynchronize(last) == 0 && cudaEventQuery(last) == 0);
  EXPECT(cudaEventDestroy(last) == 0 && cudaEventDestroy(last) == 400);
  EXPECT(cudaStreamDestroy(other) == 0 && cudaStreamDestroy(other) == 400);
  EXPECT(cudaStreamCreateWithPriority(&other, 0, -5) == 0);
  EXPECT(cudaStreamIsCapturing(other, &number) == 0 && number == 0);
  void* function = nullptr;
  for (const char* name : {"cuTensorMapEncodeTiled", "cuNothing"}) {
    const bool known = std::strcmp(name, "cuNothing") != 0;
    EXPECT(cudaGetDriverEntryPointByVersion(name, &function, 12000, 0, &number) ==
           (known ? 0 : 500));
    EXPECT((function != nullptr) == known && number == (known ? 0 : 1));
  }
  EXPECT(cudaGetDriverEntryPoint("cuInit", &function, 0, &number) == 0 && function && number == 0);
  EXPECT(std::strcmp(cudaGetErrorName(719), "CUDA_ERROR_LAUNCH_FAILED") == 0);
  EXPECT(std::strcmp(cudaGetErrorString(719), "a kernel failed") == 0);
  EXPECT(std::strcmp(cudaGetErrorName(12345), "unrecognized error code") == 0);
  EXPECT(cudaFree(dx) == 0 && cudaFree(nullptr) == 0 && cudaFree(dx) == 1);

  // A stub without a configuration, and last a kernel that fails: its device is lost, the other is not.
  while (cudaGetLastError() != 0) {
  }
  add(dx, dy);
  EXPECT(cudaGetLastError() == 9);
  EXPECT(cudaLaunchKernel(fail_kernel, dim3{}, dim3{}, nullptr, 0, nullptr) == 0);
  EXPECT(cudaDeviceSynchronize() == 719 && cudaGetLastError() == 719);
  EXPECT(cudaMalloc(&dx, 4) == 719);
  EXPECT(cudaSetDevice(1) == 0 && cudaMalloc(&dx, 4) == 0);
  EXPECT(cudaLaunchKernel(count_kernel, dim3{}, dim3{}, nullptr, 0, nullptr) == 209);
  __cudaUnregisterFatBinary(binary);
  std::printf(failures == 0 ? "passed\n" : "failed\n");
  return failures != 0;
}
