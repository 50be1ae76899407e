// Host code shared by the one-kernel in-place products of Hopper: tensor maps, counters, launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "dense/inplace/panels_cost.h"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.h"

namespace matmuls::in_place {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kMaxShared = 227 << 10;

// Two counters per team, zero between launches. Launches that may run concurrently use different slots.
constexpr int kSlots = 2048;

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

// The counters' slot of this stream, or of this graph capture on this stream. Two launches of one captured node write
// over the same a, so they never run concurrently. None if all slots are taken.
inline std::optional<int> slot_of(cudaStream_t stream) {
  unsigned long long id = 0, capture = 0;
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  if (status == cudaStreamCaptureStatusActive) {
    // A stream's id cannot be queried in a capture; the address is valid until its end.
    id = reinterpret_cast<uintptr_t>(stream);
  } else {
    capture = 0;
    C10_CUDA_CHECK(cudaStreamGetId(stream, &id));
  }
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::map<std::tuple<int, unsigned long long, unsigned long long>, int>;
  static std::array<int, 64> taken{};
  const int device = c10::cuda::current_device();
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(device, id, capture);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (device >= static_cast<int>(taken.size()) || taken[device] == kSlots) return std::nullopt;
  return known[key] = taken[device]++;
}

// The counters of one launch: the stream's slot, or a tensor of its own.
struct Counters {
  std::optional<int> slot;
  at::Tensor spare;

  Counters(cudaStream_t stream, const at::Tensor& a) : slot(slot_of(stream)) {
    if (!slot) spare = zeros({2 * kTeams}, a.options().dtype(at::kInt));
  }
  unsigned* own() const {
    return spare.defined() ? reinterpret_cast<unsigned*>(spare.mutable_data_ptr<int>()) : nullptr;
  }
};

// Launches early (PDL; the kernel waits for its predecessor itself): saves 0.4 to 0.8 us (H200). Returns false if
// blocks that wait for each other cannot all be resident, as this process may have only part of the GPU.
template <class Kernel, class... Arguments>
bool start(Launch& launch, bool together, int blocks_of_a_cluster, Kernel kernel, const Arguments&... arguments) {
  launch.in_clusters(blocks_of_a_cluster);
  launch.early();
  if (together) launch.together();
  return launch.if_all_fit(kernel, arguments...);
}

// TF32 wgmma reads an MN-major operand only from registers, and only as the left one. For such a b the tile is computed
// transposed: b's columns by a's rows.
template <class T, bool b_k_apart>
constexpr bool kTurned = sizeof(T) == 4 && b_k_apart;

// The product of few rows (few_rows_sm90.cu), in tiles of kFewRows x kFewColumns results per block.
constexpr int kFewRows = 128, kFewColumns = 64;
// True if the tiles fit in one wave.
template <class T, bool b_k_apart>
bool few_rows_fit(const Operands& o);
// Computes it, if few_rows_fit. False if the GPU has no room for blocks that wait for each other.
template <class T, bool b_k_apart>
bool multiply_few_rows(const Operands& o);

}  // namespace matmuls::in_place
