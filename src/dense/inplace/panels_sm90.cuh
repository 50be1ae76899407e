// Host code shared by the one-kernel in-place products of Hopper: tensor maps, counters, launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "dense/inplace/panels_cost.h"
#include "gpu/counter_slots.h"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"
#include "gpu/team_start.cuh"
#include "gpu/tensor_map.h"

namespace matmuls::in_place {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kMaxShared = 227 << 10;

constexpr int kMostTeams = 128;  // blocks that read the same rows of a form a team

// Counters in global memory of a team. Zero between launches.
struct TeamCounters {
  TeamStart start;
  unsigned read[2];  // blocks that have read a panel, for alternate panels
};

struct Operands {
  at::Tensor a, b, bias;
  int64_t columns;
};

// Tensor map of a matrix with `columns` contiguous columns, in boxes of 128 bytes by `box_rows`.
template <class T>
CUtensorMap map_of(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * sizeof(T)};
  const cuuint32_t box[2] = {kRowBytes / sizeof(T), static_cast<cuuint32_t>(box_rows)};
  return tensor_map<T>("matmul_", data, sizes, strides, box);
}

// The counters of one launch: the slot of the current stream, or of the graph that it captures; without one, zeroed
// memory of the launch's own.
struct Counters {
  std::optional<int> slot;
  at::Tensor spare;

  explicit Counters(const at::Tensor& a) : slot(counter_slot(c10::cuda::getCurrentCUDAStream())) {
    constexpr int64_t words = kMostTeams * sizeof(TeamCounters) / sizeof(int);
    if (!slot) spare = zeros({words}, a.options().dtype(at::kInt));
  }
  template <class T>
  T* own() const {
    return spare.defined() ? reinterpret_cast<T*>(spare.mutable_data_ptr<int>()) : nullptr;
  }
};

// Launches early (PDL; the kernel waits for its predecessor itself): saves 0.4 to 0.8 us (H200).
template <class Kernel, class... Arguments>
void start(Launch& launch, int blocks_of_a_cluster, Kernel kernel, const Arguments&... arguments) {
  launch.in_clusters(blocks_of_a_cluster);
  launch.programmatic();
  launch(kernel, arguments...);
}

// TF32 wgmma reads an MN-major operand only from registers, and only as the left one. For such a b the tile is computed
// transposed: b's columns by a's rows.
template <class T, bool b_k_apart>
constexpr bool kTransposedTile = sizeof(T) == 4 && b_k_apart;

// The product of few rows (few_rows_sm90.cu), in tiles of kFewRows x kFewColumns results per block.
constexpr int kFewRows = 128, kFewColumns = 64;
// True if the tiles fit in one wave.
template <class T, bool b_k_apart>
bool few_rows_fit(const Operands& o);
// Computes it, if few_rows_fit.
template <class T, bool b_k_apart>
void multiply_few_rows(const Operands& o);

}  // namespace matmuls::in_place
