// Kernel launches with attributes: programmatic dependent launch (PDL), clusters; and occupancy.
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

// An empty kernel whose attributes tell the PTX version that all kernels were compiled for.
template <int = 0>
__global__ void version_kernel() {}

// True if the running code has sm_90 instructions. A later GPU may run the PTX of an earlier architecture.
inline bool has_sm90_code() {
  static PerDevice<int> known{};  // a kernel's PTX version; 0: not yet queried
  const int device = c10::cuda::current_device();
  int version = known[device].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, version_kernel<>));
    known[device].store(version = attributes.ptxVersion, std::memory_order_relaxed);
  }
  return version >= 90 && device_limits(device).major >= 9;
}

// A launch on the current stream with its attributes.
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

  // Groups the grid into clusters of `blocks` blocks.
  void in_clusters(int blocks) {
    ask(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }
  // For clusters of which several fit on a multiprocessor: they may start wherever their blocks fit. By default they
  // start only where both multiprocessors of a pair (TPC) are free: with 16 of 132 free, one of each pair, none of two
  // blocks of 100 KB starts; with this, 16 do (H200).
  void balance_clusters() {
    ask(cudaLaunchAttributeClusterSchedulingPolicyPreference).clusterSchedulingPolicyPreference =
        cudaClusterSchedulingPolicyLoadBalancing;
  }
  // Programmatic dependent launch where the GPU supports it: blocks start while the last blocks of the previous kernel
  // run, which saves a microsecond between kernels. The kernel must call ptx::griddepcontrol_wait before it reads what
  // that kernel writes.
  void programmatic() {
    if (has_sm90_code())
      ask(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  }

  template <class... Wanted, class... Given>
  void operator()(void (*kernel)(Wanted...), Given&&... arguments) const {
    if (is_simulated()) C10_CUDA_CHECK(launch_simulated(reinterpret_cast<const void*>(kernel), config));
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Given>(arguments)...));
  }

 private:
  cudaLaunchAttributeValue& ask(cudaLaunchAttributeID id) {
    auto& attribute = attributes[config.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }
};

template <class... Wanted, class... Given>
void launch_programmatic(void (*kernel)(Wanted...), dim3 grid, dim3 threads, Given&&... arguments) {
  Launch launch(grid, threads);
  launch.programmatic();
  launch(kernel, std::forward<Given>(arguments)...);
}

// Allows the kernel all of the device's dynamic shared memory; set once per device.
template <auto kernel>
void allow_shared_memory() {
  static PerDevice<bool> done{};
  auto& here = done[c10::cuda::current_device()];
  if (here.load(std::memory_order_acquire)) return;
  allow_all_shared_memory(reinterpret_cast<const void*>(kernel));
  here.store(true, std::memory_order_release);
}

// Number of blocks, or of clusters of `ranks` blocks, of a kernel that can be resident; 0 if none fits. Allows the
// kernel its shared memory. Caches recent results by context, threads, blocks per cluster and dynamic shared memory.
template <auto kernel>
int resident(const cudaLaunchConfig_t& launch, int ranks) {
  constexpr int kAnswer = 24, kPlaces = 16;
  static std::array<std::atomic<uint64_t>, kPlaces> known{};  // key << kAnswer | result
  const auto* const function = reinterpret_cast<const void*>(kernel);
  const int context = context_number();
  // In units of 16 bytes; shared memory is allocated in units of 128 bytes.
  const uint64_t shared = (launch.dynamicSmemBytes + 15) / 16;
  if (shared >= 1 << 15) return 0;  // half a megabyte
  const uint64_t key = static_cast<uint64_t>(context + 1) << 32 |
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

// Number of clusters of `blocks` (at most 8) that can be resident; 0 if none. Allows the kernel its shared memory.
template <auto kernel, int threads, int shared>
int clusters_at_once(int blocks) {
  static std::array<PerContext<int>, 9> known{};  // result + 1; 0: unknown
  auto& here = known[blocks][context_number()];
  const int last = here.load(std::memory_order_acquire);
  if (last > 0 && !is_simulated()) return last - 1;
  Launch launch(blocks, threads, shared);
  if (blocks > 1) launch.in_clusters(blocks);
  const int fit = resident<kernel>(launch.config, blocks);
  if (!is_simulated()) here.store(fit + 1, std::memory_order_release);
  return fit;
}

}  // namespace matmuls
