// A kernel launched before the one ahead of it in the stream has ended.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

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

// Its blocks start while the last ones of the kernel before work, and wait for them, where the GPU can: a microsecond
// between kernels. The kernel must call ptx::wait_for_earlier before it reads what that one writes.
template <class... Wanted, class... Given>
void launch_early(void (*kernel)(Wanted...), dim3 grid, dim3 threads, Given&&... arguments) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = threads;
  launch.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch.attrs = &early;
  launch.numAttrs = has_sm90_code() ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, std::forward<Given>(arguments)...));
}

}  // namespace matmuls
