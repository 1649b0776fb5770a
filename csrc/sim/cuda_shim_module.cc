// The simulated driver's modules, functions and launches: which PTX is taken, what a device and a
// function answer, and what is wrong with a launch before it runs.
#include <algorithm>
#include <cstring>

#include "sim/cuda_image.h"
#include "sim/cuda_shim_state.h"
#include "sim/ptx/lexer.h"

namespace jax_fp4::sim {
namespace {

// Reserved in the shared memory of each CTA since compute capability 8.0 (CUDA programming guide).
u32 reserved_shared(int chip) { return chip >= 80 ? 1024 : 0; }

[[noreturn]] void refuse(CUresult code, const std::string& why) { throw ApiError(code, why); }

std::string text(const Dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

// The newest PTX of a driver (PTX ISA, release notes): 8.0 came with CUDA 12.0, 9.0 with 13.0; 12.6 and
// the releases after it are one behind their number.
int newest_ptx(int driver_version) {
  const int major = driver_version / 1000, minor = driver_version % 1000 / 10;
  if (major == 12) return 80 + (minor >= 6 ? minor - 1 : minor);
  return 90 + (major - 13) * 10 + minor;
}

u32 clusters_at_once(const std::string& chip, const Program& program, const LaunchSpec& spec) {
  const u32 ctas =
      spec.sms * ctas_per_multiprocessor(chip, program, spec.block.count(), spec.dynamic_shared);
  return static_cast<u32>(ctas / spec.cluster.count());
}

void check_sizes(const LaunchSpec& spec) {
  constexpr u32 kGrid[3] = {0x7FFF'FFFF, 65535, 65535}, kBlock[3] = {1024, 1024, 64};
  const u32 grid[3] = {spec.grid.x, spec.grid.y, spec.grid.z};
  const u32 block[3] = {spec.block.x, spec.block.y, spec.block.z};
  for (int d = 0; d < 3; ++d) {
    if (grid[d] < 1 || grid[d] > kGrid[d])
      refuse(CUDA_ERROR_INVALID_VALUE, "grid " + text(spec.grid) +
                                           ": expected 1 to 2147483647, 65535 " +
                                           "and 65535 in the three dimensions");
    if (block[d] < 1 || block[d] > kBlock[d])
      refuse(CUDA_ERROR_INVALID_VALUE,
             "block " + text(spec.block) +
                 ": expected 1 to 1024, 1024 and 64 in the three dimensions");
  }
  if (spec.block.count() > 1024)
    refuse(CUDA_ERROR_INVALID_VALUE, "block " + text(spec.block) + " has " +
                                         std::to_string(spec.block.count()) +
                                         " threads; expected at most 1024");
}

// Sets the attributes that change what runs; hints are let pass by name, and nothing else is.
void apply_attributes(const CUlaunchConfig& config, LaunchSpec& spec, bool& programmatic) {
  if (config.numAttrs != 0 && !config.attrs)
    refuse(CUDA_ERROR_INVALID_VALUE, "attrs: got a null pointer for " +
                                         std::to_string(config.numAttrs) + " launch attributes");
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: {
        const auto& d = attribute.value.clusterDim;
        spec.cluster = {d.x, d.y, d.z};
        break;
      }
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        programmatic = attribute.value.number != 0;
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (attribute.value.number != 0)
          refuse(CUDA_ERROR_NOT_SUPPORTED,
                 "launch attribute COOPERATIVE: cooperative launches are not modelled");
        break;
      case CU_LAUNCH_ATTRIBUTE_IGNORE:
      case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      // The driver may take the cluster dimension instead, and this one always does.
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION: break;
      default:
        refuse(CUDA_ERROR_NOT_SUPPORTED,
               "launch attribute " + std::to_string(attribute.id) + " is not modelled");
    }
  }
}

}  // namespace

u32 ctas_per_multiprocessor(const std::string& chip, const Program& program, u64 threads,
                            u64 dynamic_shared) {
  const int number = chip_of(chip).number;
  const ChipLimits limits = limits_of(number);
  const u64 shared = program.static_shared_bytes + dynamic_shared + reserved_shared(number);
  u64 ctas = kCtasPerMultiprocessor;
  ctas = std::min<u64>(ctas,
                       limits.threads / static_cast<u64>(round_up(static_cast<i64>(threads), 32)));
  if (shared != 0) ctas = std::min<u64>(ctas, limits.shared_bytes / shared);
  return static_cast<u32>(ctas);
}

CUmodule load_module(ShimState& state, Context& context, const void* image) {
  if (!image) refuse(CUDA_ERROR_INVALID_VALUE, "image: expected a module, got a null pointer");
  const std::string& device = state.options.devices[static_cast<std::size_t>(context.device)];
  std::vector<std::string> texts;
  try {
    texts = ptx_of_image(image);
  } catch (const std::invalid_argument& e) {
    refuse(CUDA_ERROR_INVALID_IMAGE, e.what());
  }
  // The text for the nearest chip; of one chip's texts the most specific: a, then f, then plain.
  const auto rank = [](const std::string& ptx) {
    const Chip target = chip_of(ptx_target(ptx));
    return std::pair(target.number, target.suffix == 'a' ? 2 : target.suffix == 'f' ? 1 : 0);
  };
  const std::string* best = nullptr;
  std::string targets;
  for (const std::string& ptx : texts) {
    const std::string target = ptx_target(ptx);
    targets += (targets.empty() ? "" : ", ") + target;
    if (!target.empty() && runs_on(target, device) && (!best || rank(ptx) > rank(*best)))
      best = &ptx;
  }
  if (targets.empty()) refuse(CUDA_ERROR_INVALID_PTX, "the PTX text has no .target");
  if (!best)
    refuse(CUDA_ERROR_NO_BINARY_FOR_GPU,
           "the image is for " + targets + "; the device is sm_" + device);
  const int newest = newest_ptx(state.options.driver_version);
  if (ptx_version(*best) > newest)
    refuse(CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
           "the PTX text is of version " + std::to_string(ptx_version(*best) / 10) + "." +
               std::to_string(ptx_version(*best) % 10) + "; the driver reads up to " +
               std::to_string(newest / 10) + "." + std::to_string(newest % 10));
  try {
    auto module = std::make_unique<ShimModule>();
    module->context = &context;
    module->loaded = &context.machine->load(*best);
    return state.modules.add(std::move(module));
  } catch (const PtxError& e) {
    refuse(CUDA_ERROR_INVALID_PTX, e.what());
  }
}

void ShimState::unload(CUmodule handle) {
  ShimModule& module = module_of(handle);
  drain(*module.context);
  functions.erase_if([&](const ShimFunction& f) { return f.module == &module; });
  module.context->machine->unload(*module.loaded);
  modules.erase(handle);
}

int device_attribute(const ShimState& state, CUdevice device, CUdevice_attribute attribute) {
  const int chip = chip_of(state.chip(device)).number;
  const ChipLimits limits = limits_of(chip);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7FFF'FFFF;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return kDefaultSharedBytes;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return kLanes;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return static_cast<int>(state.multiprocessors(device));
    case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 0;
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return static_cast<int>(limits.threads);
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return chip / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return chip % 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return static_cast<int>(limits.shared_bytes);
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return static_cast<int>(limits.cta_shared_bytes);
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return kCtasPerMultiprocessor;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return static_cast<int>(reserved_shared(chip));
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: return chip >= 90;
  }
  refuse(CUDA_ERROR_NOT_SUPPORTED,
         "device attribute " + std::to_string(attribute) + " is not modelled");
}

int function_attribute(const ShimState& state, const ShimFunction& function,
                       CUfunction_attribute attribute) {
  const Program& program = function.program();
  const u32(&most)[3] = program.max_block;
  const u32(&cluster)[3] = program.required_cluster;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return static_cast<int>(most[0] ? most[0] * most[1] * most[2] : 1024);
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: return static_cast<int>(program.static_shared_bytes);
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
      return static_cast<int>(function.module->loaded->constants().bytes);
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: return static_cast<int>(program.local_bytes);
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: {
      const std::string& chip = state.chip(function.module->context->device);
      return attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION
                 ? chip_of(function.module->loaded->module().target).number
                 : chip_of(chip).number;
    }
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: return 0;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return static_cast<int>(function.max_dynamic_shared);
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET: return 0;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      return static_cast<int>(cluster[attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH]);
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: return function.non_portable_cluster;
    default:
      // Registers among them: PTX has as many as it likes, and nothing here assigns real ones.
      refuse(CUDA_ERROR_NOT_SUPPORTED,
             "function attribute " + std::to_string(attribute) + " is not modelled");
  }
}

void set_function_attribute(const ShimState& state, ShimFunction& function,
                            CUfunction_attribute attribute, int value) {
  const int chip = chip_of(state.chip(function.module->context->device)).number;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
      const i64 most =
          i64{limits_of(chip).cta_shared_bytes} - function.program().static_shared_bytes;
      if (value < 0 || value > most)
        refuse(CUDA_ERROR_INVALID_VALUE, "MAX_DYNAMIC_SHARED_SIZE_BYTES of '" + function.entry +
                                             "': expected 0 to " + std::to_string(most) + ", got " +
                                             std::to_string(value));
      function.max_dynamic_shared = static_cast<u32>(value);
      return;
    }
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      function.non_portable_cluster = value != 0;
      return;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE: return;  // hints
    default:
      refuse(CUDA_ERROR_INVALID_VALUE,
             "function attribute " + std::to_string(attribute) + " cannot be set");
  }
}

KernelLaunch make_launch(const ShimState& state, const ShimFunction& function,
                         const CUlaunchConfig& config) {
  const CUdevice device = function.module->context->device;
  const std::string& chip = state.chip(device);
  const bool clusters = chip_of(chip).number >= 90;
  const Program& program = function.program();
  KernelLaunch launch = {function.handle, function.entry, {}, false};
  LaunchSpec& spec = launch.spec;
  spec.grid = {config.gridDimX, config.gridDimY, config.gridDimZ};
  spec.block = {config.blockDimX, config.blockDimY, config.blockDimZ};
  spec.dynamic_shared = config.sharedMemBytes;
  spec.seed = state.options.seed;
  spec.max_instructions = state.options.max_instructions;
  spec.checks = state.options.checks;
  spec.sms = state.multiprocessors(device);
  if (!state.options.costs.empty()) spec.costs = {.count = true, .time = true, .data = false};
  check_sizes(spec);
  apply_attributes(config, spec, launch.programmatic);
  if (spec.cluster.count() == 0)
    refuse(CUDA_ERROR_INVALID_VALUE, "cluster " + text(spec.cluster) + " must not be empty");
  const u32(&required)[3] = program.required_cluster;
  if (required[0] != 0 && spec.cluster.count() == 1)
    spec.cluster = {required[0], required[1], required[2]};
  if (!clusters && (spec.cluster.count() > 1 || launch.programmatic))
    refuse(CUDA_ERROR_NOT_SUPPORTED,
           "sm_" + chip + " has neither clusters nor programmatic launches; they need sm_90");
  const u64 allowed = function.non_portable_cluster ? 16 : kPortableCluster;
  if (spec.cluster.count() > allowed)
    refuse(
        CUDA_ERROR_INVALID_CLUSTER_SIZE,
        "cluster " + text(spec.cluster) + " of '" + function.entry + "': expected at most " +
            std::to_string(allowed) + " CTAs" +
            (function.non_portable_cluster ? ""
                                           : "; up to 16 with NON_PORTABLE_CLUSTER_SIZE_ALLOWED"));
  if (spec.dynamic_shared > function.max_dynamic_shared)
    refuse(CUDA_ERROR_INVALID_VALUE,
           "sharedMemBytes of '" + function.entry + "': expected at most " +
               std::to_string(function.max_dynamic_shared) + ", got " +
               std::to_string(spec.dynamic_shared) +
               "; raise MAX_DYNAMIC_SHARED_SIZE_BYTES with cuFuncSetAttribute");
  const u32(&most)[3] = program.max_block;
  if (most[0] != 0 && spec.block.count() > u64{most[0]} * most[1] * most[2])
    refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
           "block " + text(spec.block) + " of '" + function.entry + "' has " +
               std::to_string(spec.block.count()) + " threads; it was compiled for at most " +
               std::to_string(u64{most[0]} * most[1] * most[2]));
  spec.resident_clusters = clusters_at_once(chip, program, spec);
  if (spec.resident_clusters == 0)
    refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
           "cluster " + text(spec.cluster) + " of '" + function.entry + "' with " +
               std::to_string(program.static_shared_bytes + spec.dynamic_shared) +
               " bytes of shared memory for each CTA does not fit on the device at once");
  return launch;
}

std::vector<u8> pack_parameters(const Program& program, void** parameters, void** extra) {
  std::vector<u8> block(program.parameter_bytes);
  if (parameters && extra)
    refuse(CUDA_ERROR_INVALID_VALUE, "kernelParams and extra: expected one of them, got both");
  if (extra) {
    // Pairs that start with 1 (the buffer) or 2 (its size), up to a null pointer.
    const void* buffer = nullptr;
    std::size_t bytes = 0;
    for (; *extra; extra += 2) {
      const auto what = reinterpret_cast<u64>(extra[0]);
      if (what == 1) buffer = extra[1];
      if (what == 2) bytes = *static_cast<const std::size_t*>(extra[1]);
      if (what > 2)
        refuse(CUDA_ERROR_INVALID_VALUE,
               "extra: expected CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE or " +
                   std::string("_END, got ") + std::to_string(what));
    }
    if (!buffer || bytes < block.size())
      refuse(CUDA_ERROR_INVALID_VALUE, "extra: '" + program.entry + "' takes " +
                                           std::to_string(block.size()) +
                                           " bytes of parameters, got " + std::to_string(bytes));
    std::memcpy(block.data(), buffer, block.size());
    return block;
  }
  for (std::size_t i = 0; i < program.parameters.size(); ++i) {
    const ParameterLayout& p = program.parameters[i];
    if (!parameters || !parameters[i])
      refuse(CUDA_ERROR_INVALID_VALUE, "kernelParams[" + std::to_string(i) + "] of '" +
                                           program.entry + "': expected a pointer to " +
                                           std::to_string(p.bytes) + " bytes, got a null pointer");
    std::memcpy(block.data() + p.offset, parameters[i], p.bytes);
  }
  return block;
}

}  // namespace jax_fp4::sim
