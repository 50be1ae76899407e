// A kernel launched before the one ahead of it in the stream has ended.
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

namespace matmuls {

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
  launch.numAttrs = at::cuda::getCurrentDeviceProperties()->major >= 9 ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, std::forward<Given>(arguments)...));
}

}  // namespace matmuls
