#ifdef MATMULS_CUDA
#include "gpu/device_limits.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu/tensor_map.h"

namespace matmuls {
namespace {

#ifdef MATMULS_SM90A
constexpr bool kHopperCode = true;
#else
constexpr bool kHopperCode = false;
#endif
// Bytes; shared memory of a block of capability 9.0, for which the Hopper kernels are laid out.
constexpr int64_t kHopperShared = 227 << 10;
constexpr int64_t kSharedOfSystem = 1 << 10;  // bytes that the system reserves per block, from capability 8.0 on

const DeviceLimits& limits_of_gpu(int device) {
  static PerDevice<const DeviceLimits*> known{};  // never freed: one entry per GPU
  auto& here = known.at(device);
  if (const auto* limits = here.load(std::memory_order_acquire)) return *limits;
  const auto* of = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  const DeviceLimits* const asked = new DeviceLimits{of->major,
                                                     of->minor,
                                                     of->multiProcessorCount,
                                                     static_cast<int64_t>(of->sharedMemPerBlockOptin),
                                                     static_cast<int64_t>(of->sharedMemPerMultiprocessor),
                                                     of->l2CacheSize,
                                                     kHopperCode};
  const DeviceLimits* before = nullptr;
  if (here.compare_exchange_strong(before, asked)) return *asked;
  delete asked;
  return *before;
}

std::atomic<const std::vector<DeviceLimits>*> simulated{nullptr};

cudaFuncAttributes attributes_of(const void* kernel) {
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return attributes;
}

int64_t shared_of(const void* kernel, const cudaLaunchConfig_t& launch) {
  return static_cast<int64_t>(launch.dynamicSmemBytes + attributes_of(kernel).sharedSizeBytes);
}

int threads_of(const cudaLaunchConfig_t& launch) {
  return static_cast<int>(launch.blockDim.x * launch.blockDim.y * launch.blockDim.z);
}

}  // namespace

const DeviceLimits& device_limits(int device) {
  if (const auto* all = simulated.load(std::memory_order_acquire)) return all->at(device);
  return limits_of_gpu(device);
}
const DeviceLimits& device_limits() { return device_limits(c10::cuda::current_device()); }

bool has_hopper_kernels(int device) {
  const DeviceLimits& limits = device_limits(device);
  return limits.hopper_code && limits.major == 9 && limits.minor == 0 && limits.shared_per_block >= kHopperShared &&
         tensor_map_encoder() != nullptr;
}

bool is_simulated() { return simulated.load(std::memory_order_relaxed) != nullptr; }

void simulate_device(const SimulatedDevice& with) {
  if (!with.shared_memory && !with.multiprocessors && !with.capability && !with.hopper_code)
    return simulated.store(nullptr, std::memory_order_release);
  auto* const all = new std::vector<DeviceLimits>;  // never freed: another thread may read it
  for (int device = 0; device < c10::cuda::device_count(); ++device) {
    DeviceLimits limits = limits_of_gpu(device);
    if (with.capability) std::tie(limits.major, limits.minor) = *with.capability;
    if (with.shared_memory) {
      limits.shared_per_block = std::min(*with.shared_memory, limits.shared_per_block);
      limits.shared_per_multiprocessor = std::min(limits.shared_per_block + (limits.major >= 8 ? kSharedOfSystem : 0),
                                                  limits.shared_per_multiprocessor);
    }
    limits.multiprocessors = std::min(with.multiprocessors.value_or(limits.multiprocessors), limits.multiprocessors);
    limits.hopper_code = limits.hopper_code && with.hopper_code.value_or(true);
    all->push_back(limits);
  }
  simulated.store(all, std::memory_order_release);
}

int context_number() {
  static const auto entry = [](const char* name, unsigned version) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result));
    return result == cudaDriverEntryPointSuccess ? found : nullptr;
  };
  static const auto current = reinterpret_cast<decltype(&cuCtxGetCurrent)>(entry("cuCtxGetCurrent", 4000));
  static const auto id_of = reinterpret_cast<decltype(&cuCtxGetId)>(entry("cuCtxGetId", 12000));
  // A context's id is never that of a later one, as its address may be.
  CUcontext context = nullptr;
  unsigned long long id = 0;
  if (!current || !id_of || current(&context) != CUDA_SUCCESS || !context || id_of(context, &id) != CUDA_SUCCESS)
    return c10::cuda::current_device();
  static thread_local std::pair<unsigned long long, int> last{0, -1};
  if (last.second >= 0 && last.first == id) return last.second;
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<unsigned long long, int>;
  const std::lock_guard lock(mutex);
  const auto number = std::min<int>(static_cast<int>(known.size()), kMostContexts - 1);
  last = {id, known.try_emplace(id, number).first->second};
  return last.second;
}

void allow_all_shared_memory(const void* kernel) {
  const int64_t most = limits_of_gpu(c10::cuda::current_device()).shared_per_block -
                       static_cast<int64_t>(attributes_of(kernel).sharedSizeBytes);
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)));
}

int blocks_that_fit(const void* kernel, const cudaLaunchConfig_t& launch, int ranks) {
  const DeviceLimits& gpu = limits_of_gpu(c10::cuda::current_device());
  if (shared_of(kernel, launch) > gpu.shared_per_block) return 0;
  int fit = 0;
  if (ranks == 1) {
    C10_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, threads_of(launch), launch.dynamicSmemBytes));
    return fit * gpu.multiprocessors;
  }
  // Clusters of more than 8 blocks are non-portable and need this attribute.
  if (ranks > 8) C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&fit, kernel, &launch);
  if (status == cudaErrorInvalidClusterSize) {
    (void)cudaGetLastError();
    return 0;
  }
  C10_CUDA_CHECK(status);
  return fit;
}

int blocks_that_fit_simulated(const void* kernel, const cudaLaunchConfig_t& launch, int ranks, int on_this_gpu) {
  const int device = c10::cuda::current_device();
  const DeviceLimits &gpu = limits_of_gpu(device), &limits = device_limits(device);
  const int64_t shared = shared_of(kernel, launch);
  if (shared > limits.shared_per_block) return 0;
  if (ranks > 1)
    return limits.major >= 9 ? static_cast<int>(int64_t{on_this_gpu} * limits.multiprocessors / gpu.multiprocessors)
                             : 0;
  const int64_t by_shared = limits.shared_per_multiprocessor / std::max<int64_t>(shared, 1);
  return static_cast<int>(std::min<int64_t>(on_this_gpu / gpu.multiprocessors, by_shared)) * limits.multiprocessors;
}

cudaError_t launch_simulated(const void* kernel, const cudaLaunchConfig_t& launch) {
  const DeviceLimits& limits = device_limits();
  if (shared_of(kernel, launch) > limits.shared_per_block) return cudaErrorInvalidValue;
  // The attributes ask for clusters or for programmatic dependent launch.
  if (launch.numAttrs > 0 && limits.major < 9) return cudaErrorNotSupported;
  return cudaSuccess;
}

}  // namespace matmuls
#endif
