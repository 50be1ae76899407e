// matmul_ in one kernel on Hopper: a <- a @ op(b) + bias with no memory beside a.
//
// The blocks of a cluster share a panel of a's rows, each with its own columns of the result, and together they cover
// all of them. Each tile of a is read once and sent to the whole cluster; the products stay in registers until every
// block of the cluster has received the last tile of the panel, and only then is the panel written over. No block waits
// for one that may not be running: the hardware starts the blocks of a cluster together.
//
// In a block one warp fetches tiles ahead, through the end of a panel into the next, and one or two warpgroups
// multiply.
#ifdef MATMULS_CUDA
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>

#include "gemm_types.h"
#include "hopper.cuh"
#include "inplace_mm.h"

namespace matmuls {
namespace {

constexpr int kMaxBlocks = 8;   // of a cluster, on every Hopper
constexpr int kStages = 4;      // tiles on their way
constexpr int kRowBytes = 128;  // of a tile in shared memory: the swizzle's width
constexpr int kGroup = 128;     // threads

// A block's tile of the result: `groups` warpgroups with `high` times 64 rows each, and `columns` columns.
template <class T, int groups_, int high_, int columns_>
struct Tile {
  static constexpr int groups = groups_, high = high_, columns = columns_;
  static constexpr int rows = 64 * high * groups, depth = kRowBytes / sizeof(T);  // depth: of K a stage
  static constexpr int a_bytes = rows * kRowBytes, b_bytes = columns * kRowBytes;
  static constexpr int out_bytes = 64 * kRowBytes;  // of the result, staged on its way to memory
  static constexpr int shared = 1024 + kStages * (a_bytes + b_bytes) + 2 * groups * out_bytes + 256;
  static constexpr int threads = (groups + 1) * kGroup;
};

struct Shape {
  int panels, steps, columns, blocks;  // panels of rows, stages of K, columns of the result, blocks of a cluster
};

template <class T, class Tile, bool b_k_apart>
__global__ void __launch_bounds__(Tile::threads, 1)
    inplace_mm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                      const __grid_constant__ CUtensorMap out_map, const T* bias, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char raw[];
  unsigned char* const tiles = raw + (1024 - ptx::shared_address(raw) % 1024) % 1024;
  unsigned char* const outs = tiles + kStages * (Tile::a_bytes + Tile::b_bytes);
  const auto a_tile = [&](int stage) { return tiles + stage * Tile::a_bytes; };
  const auto b_tile = [&](int stage) { return tiles + kStages * Tile::a_bytes + stage * Tile::b_bytes; };
  __shared__ uint64_t full[kStages], empty[kStages], received;  // received: the whole panel, by the whole cluster

  const unsigned rank = ptx::cluster_rank();
  const int cluster = blockIdx.x / shape.blocks, clusters = gridDim.x / shape.blocks;
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(&full[s]);
      ptx::barrier_init(&empty[s], shape.blocks * Tile::groups);
    }
    ptx::barrier_init(&received, shape.blocks * Tile::groups);
    ptx::barrier_fence();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();

  // Every block counts its steps alike: step n uses stage n % kStages, and block n % blocks fetches its tile of a.
  if (group == Tile::groups) {
    hopper::leave_registers<40>();
    if (thread == 0) {
      const uint16_t everyone = static_cast<uint16_t>((1u << shape.blocks) - 1);
      unsigned n = 0;
      for (int panel = cluster; panel < shape.panels; panel += clusters) {
        for (int k = 0; k < shape.steps; ++k, ++n) {
          const int stage = n % kStages;
          // Whoever reads this stage in any block has read what was in it: every block is written to.
          hopper::wait_in_cluster(&empty[stage], n / kStages % 2 ^ 1);
          ptx::barrier_expect(&full[stage], Tile::a_bytes + Tile::b_bytes);
          if (n % shape.blocks == rank)
            hopper::load_for(everyone, a_map, a_tile(stage), &full[stage], k * Tile::depth, panel * Tile::rows);
          if constexpr (b_k_apart) {
            constexpr int wide = kRowBytes / sizeof(T);
#pragma unroll
            for (int c = 0; c < Tile::columns / wide; ++c)
              hopper::load(b_map, b_tile(stage) + c * Tile::depth * kRowBytes, &full[stage],
                           rank * Tile::columns + c * wide, k * Tile::depth);
          } else {
            hopper::load(b_map, b_tile(stage), &full[stage], k * Tile::depth, rank * Tile::columns);
          }
        }
      }
    }
  } else {
    hopper::take_registers<Tile::groups == 1 ? 240 : 232>();
    constexpr int kAcc = Tile::columns / 2;  // numbers a thread has of 64 rows
    float acc[Tile::high][kAcc];
    unsigned n = 0;
    const auto tell = [&](uint64_t* barrier) {  // one thread for the group, each to another block
      if (thread < shape.blocks) hopper::arrive_at(barrier, thread);
    };
    int parity = 0;
    for (int panel = cluster; panel < shape.panels; panel += clusters, parity ^= 1) {
      for (int k = 0; k < shape.steps; ++k, ++n) {
        const int stage = n % kStages;
        hopper::wait_in_cluster(&full[stage], n / kStages % 2);
        if (k + 1 == shape.steps) tell(&received);
#pragma unroll
        for (int h = 0; h < Tile::high; ++h) hopper::pin(acc[h]);
        hopper::begin_products();
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // 32 bytes of K each
          const uint64_t b = b_k_apart
                                 ? hopper::descriptor(b_tile(stage) + part * 16 * kRowBytes, Tile::depth * kRowBytes)
                                 : hopper::descriptor(b_tile(stage) + part * 32);
#pragma unroll
          for (int h = 0; h < Tile::high; ++h) {
            const unsigned char* const rows = a_tile(stage) + (group * Tile::high + h) * 64 * kRowBytes;
            hopper::multiply<T, b_k_apart>(acc[h], hopper::descriptor(rows + part * 32), b, k > 0 || part > 0);
          }
        }
        hopper::commit_products();
#pragma unroll
        for (int h = 0; h < Tile::high; ++h) hopper::pin(acc[h]);
        hopper::wait_for_products<1>();
        if (k > 0) tell(&empty[(n - 1) % kStages]);
      }
      hopper::wait_for_products<0>();
#pragma unroll
      for (int h = 0; h < Tile::high; ++h) hopper::pin(acc[h]);
      tell(&empty[(n - 1) % kStages]);

      // The panel's rows leave through two buffers a group: swizzled, so that the 8 rows that a warp writes at a time
      // lie in different banks.
      hopper::wait_in_cluster(&received, parity);
      const int warp = thread / 32, lane = thread % 32;
      constexpr int wide = kRowBytes / sizeof(T);  // columns of a buffer
#pragma unroll
      for (int h = 0; h < Tile::high; ++h) {
#pragma unroll
        for (int c = 0; c < Tile::columns / wide; ++c) {
          const int column = rank * Tile::columns + c * wide;
          if (column >= shape.columns) break;
          unsigned char* const out = outs + (group * 2 + c % 2) * Tile::out_bytes;
          if (thread == 0) hopper::wait_for_stores<1>();
          hopper::sync(1 + group, kGroup);
#pragma unroll
          for (int j = 0; j < wide / 8; ++j) {
            const int own = 8 * j + 2 * (lane % 4);  // of the buffer's columns
            float left = 0, right = 0;
            if (bias) {
              if (column + own < shape.columns) left = static_cast<float>(bias[column + own]);
              if (column + own + 1 < shape.columns) right = static_cast<float>(bias[column + own + 1]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int row = warp * 16 + half * 8 + lane / 4;
              const float* const two = &acc[h][(c * wide / 8 + j) * 4 + half * 2];
              const int byte = own * static_cast<int>(sizeof(T));
              unsigned char* const to = out + row * kRowBytes + ((byte / 16 ^ row % 8) * 16 + byte % 16);
              if constexpr (sizeof(T) == 4) {
                *reinterpret_cast<float2*>(to) = {two[0] + left, two[1] + right};
              } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
                *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(two[0] + left, two[1] + right);
              } else {
                *reinterpret_cast<__half2*>(to) = __floats2half2_rn(two[0] + left, two[1] + right);
              }
            }
          }
          hopper::publish();
          hopper::sync(1 + group, kGroup);
          if (thread == 0) hopper::store(out_map, out, column, panel * Tile::rows + (group * Tile::high + h) * 64);
        }
      }
    }
    if (thread == 0) hopper::wait_for_stores<0>();
  }
  __syncwarp();  // the fetching thread's warp
  // Others may still send to this block's barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}

// ----------------------------------------------------------------------------------------------------------- launch

using Encode = decltype(&cuTensorMapEncodeTiled);
Encode encoder() {
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    C10_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return encode;
}

// A matrix with `columns` side by side, cut in boxes of 128 bytes by `box_rows`.
template <class T>
CUtensorMap map_of(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int box_rows) {
  constexpr auto type = std::is_same_v<T, float>           ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                        : std::is_same_v<T, c10::BFloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * sizeof(T)};
  const cuuint32_t box[2] = {kRowBytes / sizeof(T), static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TORCH_CHECK(result == CUDA_SUCCESS, "matmul_: cuTensorMapEncodeTiled failed with ", static_cast<int>(result), " for ",
              rows, " x ", columns, " at a distance of ", row_stride);
  return map;
}

template <class T, class Tile, bool b_k_apart>
void launch(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, int64_t columns) {
  constexpr auto kernel = inplace_mm_kernel<T, Tile, b_k_apart>;
  const int64_t rows = a.size(0), inner = a.size(1);
  const auto up = [](int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); };
  const Shape shape{up(rows, Tile::rows), up(inner, Tile::depth), static_cast<int>(columns),
                    up(columns, Tile::columns)};

  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(Tile::threads);
  launch.dynamicSmemBytes = Tile::shared;
  launch.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.blocks), 1, 1};
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  // As many clusters as run at once, asked once a device and size.
  static std::array<std::array<std::atomic<int>, kMaxBlocks + 1>, 64> known{};
  auto& most = known[c10::cuda::current_device() % 64][shape.blocks];
  if (most.load(std::memory_order_relaxed) == 0) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::shared));
    launch.gridDim = dim3(shape.blocks);
    int fit = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch));
    most.store(std::max(fit, 1), std::memory_order_relaxed);
  }
  launch.gridDim = dim3(std::min(shape.panels, most.load(std::memory_order_relaxed)) * shape.blocks);

  T* const data = a.mutable_data_ptr<T>();
  const CUtensorMap a_map = map_of<T>(data, rows, inner, a.stride(0), Tile::rows);
  const CUtensorMap b_map = b_k_apart ? map_of<T>(b.const_data_ptr<T>(), inner, columns, b.stride(0), Tile::depth)
                                      : map_of<T>(b.const_data_ptr<T>(), columns, inner, b.stride(0), Tile::columns);
  const CUtensorMap out_map = map_of<T>(data, rows, columns, a.stride(0), 64);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, a_map, b_map, out_map,
                                    bias.defined() ? bias.const_data_ptr<T>() : nullptr, shape));
}

template <class T, bool b_k_apart>
bool choose(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, int64_t columns) {
  const int64_t sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const auto blocks = [&](int64_t rows, int64_t wide) {
    return ((a.size(0) + rows - 1) / rows) * ((columns + wide - 1) / wide);
  };
  // The largest tile that leaves no multiprocessor idle; the smallest one where none does.
  if (columns <= kMaxBlocks * 128 && blocks(128, 128) < sms) {
    launch<T, Tile<T, 1, 1, 128>, b_k_apart>(a, b, bias, columns);
  } else {
    launch<T, Tile<T, 2, 1, 256>, b_k_apart>(a, b, bias, columns);
  }
  return true;
}

// A matrix that a bulk copy can walk: its rows, side by side inside, all start on 16 bytes.
bool walkable(const at::Tensor& t) {
  const int64_t item = t.element_size();
  return t.stride(1) == 1 && t.stride(0) * item % 16 == 0 && t.stride(0) >= t.size(1) &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

}  // namespace

bool multiply_in_place_sm90(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb) {
#ifdef MATMULS_SM90A
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  if (properties->major != 9 || properties->minor != 0 || encoder() == nullptr) return false;
  const at::Tensor rows = transb ? b : b.t();  // [N, K]
  const int64_t columns = rows.size(0);
  // Bulk copies write 16 bytes at least.
  if (columns > kMaxBlocks * 256 || columns * rows.element_size() % 16 != 0 || a.size(0) > INT32_MAX || !walkable(a) ||
      (bias.defined() && bias.stride(0) != 1))
    return false;
  const bool k_apart = !walkable(rows);
  const at::Tensor b_rows = k_apart ? rows.t() : rows;
  if (!walkable(b_rows)) return false;
  switch (a.scalar_type()) {
    case at::kBFloat16:
      return k_apart ? choose<c10::BFloat16, true>(a, b_rows, bias, columns)
                     : choose<c10::BFloat16, false>(a, b_rows, bias, columns);
    case at::kHalf:
      return k_apart ? choose<c10::Half, true>(a, b_rows, bias, columns)
                     : choose<c10::Half, false>(a, b_rows, bias, columns);
    case at::kFloat:
      if (k_apart || GemmTypes(at::kFloat).compute != CUBLAS_COMPUTE_32F_FAST_TF32) return false;
      return choose<float, false>(a, b_rows, bias, columns);
    default: return false;
  }
#else
  return false;
#endif
}

}  // namespace matmuls
#endif
