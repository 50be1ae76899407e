// How kernels are launched that ask for more than a grid: before the one ahead has ended, in clusters, all at once.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

namespace matmuls {

// A kernel that tells what all of them were compiled for.
template <int = 0>
__global__ void version_kernel() {}

// Whether the code that runs here has Hopper's instructions: a later GPU may run the PTX of an earlier one.
inline bool has_sm90_code() {
  static std::atomic<int> known{0};  // 2 * (device + 1) + the answer
  const int device = c10::cuda::current_device(), last = known.load(std::memory_order_relaxed);
  if (last / 2 == device + 1) return last % 2;
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, version_kernel<>));
  const bool has = attributes.ptxVersion >= 90;
  known.store(2 * (device + 1) + (has ? 1 : 0), std::memory_order_relaxed);
  return has;
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
  // between kernels. The kernel must call ptx::wait_for_earlier before it reads what that one writes.
  void early() {
    if (has_sm90_code())
      ask(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  }
  // The GPU starts all of its blocks or none, since they wait for each other.
  void together() { ask(cudaLaunchAttributeCooperative).cooperative = 1; }

  template <class... Wanted, class... Given>
  void operator()(void (*kernel)(Wanted...), Given&&... arguments) const {
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
void launch_early(void (*kernel)(Wanted...), dim3 grid, dim3 threads, Given&&... arguments) {
  Launch launch(grid, threads);
  launch.early();
  launch(kernel, std::forward<Given>(arguments)...);
}

// Clusters of so many blocks, 8 at most, that run at once, asked once a device; the kernel is allowed its shared
// memory.
template <auto kernel, int threads, int shared>
int clusters_at_once(int blocks) {
  static std::array<std::array<std::atomic<int>, 9>, 64> known{};
  auto& most = known[c10::cuda::current_device() % 64][blocks];
  if (most.load(std::memory_order_relaxed) == 0) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    Launch launch(blocks, threads, shared);
    launch.in_clusters(blocks);
    int fit = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch.config));
    most.store(std::max(fit, 1), std::memory_order_relaxed);
  }
  return most.load(std::memory_order_relaxed);
}

}  // namespace matmuls
