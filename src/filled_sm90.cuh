// What both kernels of a product in halves (filled.h) share: the dense side's halves, and how they are launched.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "filled.cuh"

namespace matmuls {

constexpr int kSplitColumns = 16, kSplitBlocks = 8;  // a cluster takes 16 columns of the dense side

// The dense side, [inner, n], in halves. On 16 bytes each, in one piece of memory.
struct DenseHalves {
  __half* halves;    // [2, inner, n]
  int* powers;       // [n], of the columns' scales
  FillFacts* facts;  // [parts of kSplitColumns, kSplitBlocks]: of a block's rows of them

  static int64_t parts(int64_t n) { return up(n, kSplitColumns); }
  static int64_t nbytes(int64_t inner, int64_t n) {
    return 4 * inner * n + 4 * n + parts(n) * kSplitBlocks * static_cast<int64_t>(sizeof(FillFacts));
  }
  DenseHalves(void* memory, int64_t inner, int64_t n)
      : halves(static_cast<__half*>(memory)),
        powers(reinterpret_cast<int*>(halves + 2 * inner * n)),
        facts(reinterpret_cast<FillFacts*>(powers + n)) {}
};

// rest: what two of four leave of A (filled.h); out <- rest @ dense, in the rows of A that have any.
void split_dense(const at::Tensor& dense, const DenseHalves& to, const at::Tensor& rest, const at::Tensor& out);

// How a kernel in clusters is launched: before those ahead of it have ended.
struct Launch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  Launch(int64_t clusters, int blocks_of_a_cluster, int threads, int shared) {
    const int64_t blocks = clusters * blocks_of_a_cluster;
    TORCH_CHECK(blocks <= INT32_MAX, "spmm: expected a smaller result, got ", clusters, " tiles of it");
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(blocks_of_a_cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = c10::cuda::getCurrentCUDAStream();
    config.attrs = attributes;
    config.numAttrs = 2;
  }
  Launch(const Launch&) = delete;
};

// Clusters of so many blocks, 8 at most, that run at once, asked once a device; the kernel is allowed its shared
// memory.
template <auto kernel, int threads, int shared>
int clusters_at_once(int blocks) {
  static std::array<std::array<std::atomic<int>, 9>, 64> known{};
  auto& most = known[c10::cuda::current_device() % 64][blocks];
  if (most.load(std::memory_order_relaxed) == 0) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    Launch launch(1, blocks, threads, shared);
    launch.config.numAttrs = 1;  // the cluster alone
    int fit = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch.config));
    most.store(std::max(fit, 1), std::memory_order_relaxed);
  }
  return most.load(std::memory_order_relaxed);
}

}  // namespace matmuls
