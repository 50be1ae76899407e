// How kernels are launched that ask for more than a grid: before the one ahead has ended, in clusters, all at once.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "gpu/device_limits.h"

namespace matmuls {

// A kernel that tells what all of them were compiled for.
template <int = 0>
__global__ void version_kernel() {}

// Whether the code that runs here has Hopper's instructions: a later GPU may run the PTX of an earlier one.
inline bool has_sm90_code() {
  static PerDevice<int> known{};  // a kernel's PTX version; 0: not yet asked
  const int device = c10::cuda::current_device();
  int version = known[device].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, version_kernel<>));
    known[device].store(version = attributes.ptxVersion, std::memory_order_relaxed);
  }
  return version >= 90 && device_limits(device).major >= 9;
}

// A launch on the current stream, and what it asks of the GPU beyond a grid.
struct Launch {
  cudaLaunchAttribute attributes[3]{};
  cudaLaunchConfig_t config{};

  Launch(dim3 grid, dim3 threads, size_t shared = 0) {
    config.gridDim = grid;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = c10::cuda::getCurrentCUDAStream();
    config.attrs = attributes;
  }
  Launch(const Launch&) = delete;

  // The grid is of clusters of so many blocks.
  void in_clusters(int blocks) {
    ask(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }
  // Its blocks start while the last ones of the kernel before work, and wait for them, where the GPU can: a microsecond
  // between kernels. The kernel must call ptx::griddepcontrol_wait before it reads what that one writes.
  void early() {
    if (has_sm90_code())
      ask(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  }
  // The GPU starts all of its blocks or none, since they wait for each other.
  void together() { ask(cudaLaunchAttributeCooperative).cooperative = 1; }

  template <class... Wanted, class... Given>
  void operator()(void (*kernel)(Wanted...), Given&&... arguments) const {
    C10_CUDA_CHECK(launched(kernel, std::forward<Given>(arguments)...));
  }
  // Launches blocks that wait for each other. False, and nothing is launched, where they do not all fit: a context (a
  // green one, MPS) may have fewer multiprocessors than the GPU.
  template <class... Wanted, class... Given>
  [[nodiscard]] bool if_all_fit(void (*kernel)(Wanted...), Given&&... arguments) const {
    const cudaError_t status = launched(kernel, std::forward<Given>(arguments)...);
    if (status == cudaErrorCooperativeLaunchTooLarge) {
      (void)cudaGetLastError();
      return false;
    }
    C10_CUDA_CHECK(status);
    return true;
  }

 private:
  template <class... Wanted, class... Given>
  cudaError_t launched(void (*kernel)(Wanted...), Given&&... arguments) const {
    if (is_simulated())
      if (const cudaError_t refused = launch_simulated(reinterpret_cast<const void*>(kernel), config)) return refused;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Given>(arguments)...);
  }
  cudaLaunchAttributeValue& ask(cudaLaunchAttributeID id) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }
};

template <class... Wanted, class... Given>
void launch_early(void (*kernel)(Wanted...), dim3 grid, dim3 threads, Given&&... arguments) {
  Launch launch(grid, threads);
  launch.early();
  launch(kernel, std::forward<Given>(arguments)...);
}

// A kernel may have as much dynamic shared memory as the device has: said once per device.
template <auto kernel>
void allow_shared_memory() {
  static PerDevice<bool> done{};
  auto& here = done[c10::cuda::current_device()];
  if (here.load(std::memory_order_acquire)) return;
  allow_all_shared_memory(reinterpret_cast<const void*>(kernel));
  here.store(true, std::memory_order_release);
}

// How many blocks of a kernel, or clusters of `ranks` blocks, run at once; 0 where the device has no room for one. The
// kernel is allowed its shared memory. The answers of the last launches are kept, by all that they depend on: the
// device, the threads, the blocks of a cluster and the dynamic shared memory.
template <auto kernel>
int resident(const cudaLaunchConfig_t& launch, int ranks) {
  constexpr int kAnswer = 24, kPlaces = 16;
  static std::array<std::atomic<uint64_t>, kPlaces> known{};  // a key and its answer
  const auto* const function = reinterpret_cast<const void*>(kernel);
  const int device = c10::cuda::current_device();
  const uint64_t shared = (launch.dynamicSmemBytes + 15) / 16;  // shared memory is given out by 128 bytes
  if (shared >= 1 << 15) return 0;                              // half a megabyte
  const uint64_t key = static_cast<uint64_t>(device + 1) << 32 |
                       static_cast<uint64_t>(launch.blockDim.x * launch.blockDim.y) << 20 |
                       static_cast<uint64_t>(ranks) << 15 | shared;
  auto& place = known[key * 0x9e3779b97f4a7c15u >> 60];
  static_assert(kPlaces == 1 << (64 - 60));
  const uint64_t last = place.load(std::memory_order_relaxed);
  int fit = static_cast<int>(last & ((1 << kAnswer) - 1));
  if (last >> kAnswer != key) {
    allow_shared_memory<kernel>();
    fit = blocks_that_fit(function, launch, ranks);
    place.store(key << kAnswer | static_cast<unsigned>(fit), std::memory_order_relaxed);
  }
  return is_simulated() ? blocks_that_fit_simulated(function, launch, ranks, fit) : fit;
}

// Clusters of so many blocks, 8 at most, that run at once; 0 where none does. The kernel is allowed its shared memory.
template <auto kernel, int threads, int shared>
int clusters_at_once(int blocks) {
  static std::array<PerDevice<int>, 9> known{};  // the answer and 1
  auto& here = known[blocks][c10::cuda::current_device()];
  const int last = here.load(std::memory_order_acquire);
  if (last > 0 && !is_simulated()) return last - 1;
  Launch launch(blocks, threads, shared);
  if (blocks > 1) launch.in_clusters(blocks);
  const int fit = resident<kernel>(launch.config, blocks);
  if (!is_simulated()) here.store(fit + 1, std::memory_order_release);
  return fit;
}

}  // namespace matmuls
