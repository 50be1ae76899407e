// What both kernels of a product in halves (filled.h) share: how they are launched.
#pragma once

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "filled.h"

namespace matmuls {

constexpr int kSplitColumns = 16, kSplitBlocks = kFactsOfPart;  // a cluster takes 16 columns of the dense side

// halves: [2, rows, n]; powers: [n], of the columns' scales; facts: [a cluster's blocks, kFillFacts]. rest: what two of
// four leave of A (filled.h); out <- rest @ dense, in the rows of A that have any.
void split_dense(const at::Tensor& dense, const at::Tensor& halves, const at::Tensor& powers, const at::Tensor& facts,
                 const at::Tensor& rest, const at::Tensor& out);

inline int up(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

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

}  // namespace matmuls
