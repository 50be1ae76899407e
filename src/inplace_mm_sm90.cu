// matmul_ in one kernel on Hopper: a <- a @ op(b) + bias over a's own rows.
//
// Two blocks of a cluster take two neighbouring panels of a's rows and the same columns of the result: each fetches its
// own tile of a and half of b's, which goes to both. The clusters that share a pair of panels, one for each tile of
// columns, are a team. A panel may be written over once the whole team has received the last tile of it: a counter in
// global memory says when. Until then the results stand in shared memory, and the next pair is under way already: it
// has a counter of its own, since a block may be done with the next pair when another still reads this one. It cannot
// be done with the one after, whose results need the room of this one's.
//
// In a block one warp fetches tiles ahead, through the end of a panel into the next, one counts panels read, one writes
// results back, and one or two warpgroups multiply.
//
// Nobody waits for a block that does not run. The grid is as large as what runs at once, and where teams have several
// clusters it is a cooperative one: the GPU starts all of it or waits with all of it, whatever other streams run.
// Inside a team clusters wait for nothing but that all have multiplied the same pair, and that waits for earlier pairs
// alone.
#ifdef MATMULS_CUDA
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "gemm_types.h"
#include "hopper.cuh"
#include "inplace_mm.h"

namespace matmuls {
namespace {

constexpr int kPair = 2;        // blocks of a cluster
constexpr int kRowBytes = 128;  // of a tile in shared memory: the swizzle's width
constexpr int kGroup = 128;     // threads
constexpr int kMaxShared = 227 << 10;

// A block's tile of the result: 64 rows for each of `groups` warpgroups, `columns` columns. It leaves in parts of
// `boxes` times 128 bytes a row, staged in two buffers a group; where the parts are two the whole tile is staged.
template <class T, int groups_, int columns_, int stages_, int boxes_>
struct Tile {
  static constexpr int groups = groups_, columns = columns_, stages = stages_, boxes = boxes_;
  static constexpr int rows = 64 * groups, wide = kRowBytes / sizeof(T);  // wide: columns of a box, and K of a stage
  static constexpr int parts = columns / wide / boxes;
  static constexpr int a_bytes = rows * kRowBytes, b_bytes = columns * kRowBytes;
  static constexpr int box_bytes = 64 * kRowBytes, part_bytes = boxes * box_bytes;
  static constexpr int barriers = 2 * stages + 4 * groups + 2;
  static constexpr int shared = stages * (a_bytes + b_bytes) +
                                groups * (2 * part_bytes + columns * static_cast<int>(sizeof(float))) + 8 * barriers;
  static constexpr int threads = (groups + 1) * kGroup;
  static_assert(shared <= kMaxShared && parts % 2 == 0);
};

struct Shape {
  int rows, columns, pairs, across, steps;  // pairs of panels, tiles across the result, stages of K
};

// Two counters a team, for its pairs in turn, zero between launches: who leaves last sets them so. Launches that may
// run at once have their own.
constexpr int kSlots = 2048, kTeams = 64;
__device__ unsigned counters[kSlots][kTeams][2];

template <class T, class Tile, bool b_k_apart>
__global__ void __launch_bounds__(Tile::threads, 1)
    inplace_mm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                      const __grid_constant__ CUtensorMap out_map, const T* bias, const Shape shape, unsigned* spare,
                      int slot) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char tiles[];
  unsigned char* const outs = tiles + Tile::stages * (Tile::a_bytes + Tile::b_bytes);
  float* const biases = reinterpret_cast<float*>(outs + Tile::groups * 2 * Tile::part_bytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(biases + Tile::groups * Tile::columns);
  uint64_t* const empty = full + Tile::stages;
  uint64_t* const staged = empty + Tile::stages;  // [part % 2][group]
  uint64_t* const unstaged = staged + 2 * Tile::groups;
  uint64_t* const received = unstaged + 2 * Tile::groups;  // [turn % 2]: the last tile of a panel
  const auto a_tile = [&](int stage) { return tiles + stage * Tile::a_bytes; };
  const auto b_tile = [&](int stage) { return tiles + Tile::stages * Tile::a_bytes + stage * Tile::b_bytes; };
  const auto out_part = [&](int buffer, int group) {
    return outs + (buffer * Tile::groups + group) * Tile::part_bytes;
  };

  const unsigned rank = ptx::cluster_rank();
  const int cluster = blockIdx.x / kPair, teams = gridDim.x / kPair / shape.across;
  const int team = cluster / shape.across, column0 = cluster % shape.across * Tile::columns;
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  unsigned* const counter = (spare ? spare : counters[slot][0]) + 2 * team;
  if (threadIdx.x == 0) {
    hopper::prefetch(a_map);
    hopper::prefetch(b_map);
    hopper::prefetch(out_map);
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::barrier_init(&full[s]);
      ptx::barrier_init(&empty[s], kPair * Tile::groups);
    }
    for (int i = 0; i < 2 * Tile::groups; ++i) {
      ptx::barrier_init(&staged[i], kGroup / 32);
      ptx::barrier_init(&unstaged[i]);
    }
    ptx::barrier_init(&received[0]);
    ptx::barrier_init(&received[1]);
    ptx::barrier_fence();
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();

  // Both blocks count their steps alike: step n uses stage n % stages.
  if (group == Tile::groups) {
    hopper::leave_registers<40>();
    if (thread == 0) {  // fetches
      unsigned n = 0;
      for (int pair = team; pair < shape.pairs; pair += teams) {
        const int row = (kPair * pair + rank) * Tile::rows;
        for (int k = 0; k < shape.steps; ++k, ++n) {
          const int stage = n % Tile::stages;
          // Both blocks have read what was in this stage: half of b goes to both.
          ptx::barrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
          ptx::barrier_expect(&full[stage], Tile::a_bytes + Tile::b_bytes);
          hopper::load(a_map, a_tile(stage), &full[stage], k * Tile::wide, row);
          constexpr uint16_t both = (1 << kPair) - 1;
          if constexpr (b_k_apart) {
            constexpr int chunks = Tile::columns / Tile::wide / kPair;
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
              const int c = rank * chunks + i;
              hopper::load_for(both, b_map, b_tile(stage) + c * Tile::wide * kRowBytes, &full[stage],
                               column0 + c * Tile::wide, k * Tile::wide);
            }
          } else {
            constexpr int half = Tile::columns / kPair;
            hopper::load_for(both, b_map, b_tile(stage) + rank * half * kRowBytes, &full[stage], k * Tile::wide,
                             column0 + rank * half);
          }
        }
      }
    } else if (thread == 64 && shape.across > 1) {  // counts: the others go on during its fence
      unsigned turn = 0;
      for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
        ptx::barrier_wait(&received[turn % 2], turn / 2 % 2);
        ptx::add_release(counter + turn % 2, 1);
      }
    } else if (thread == 32) {  // writes back
      const unsigned team_blocks = kPair * shape.across;
      unsigned use = 0, turn = 0;  // use: of a buffer
      for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
        const int row = (kPair * pair + rank) * Tile::rows;
        const auto leave = [&](int part) {
          for (int g = 0; g < Tile::groups; ++g) hopper::arrive(&unstaged[part % 2 * Tile::groups + g]);
        };
        for (int part = 0; part < Tile::parts; ++part) {
          for (int g = 0; g < Tile::groups; ++g) {
            ptx::barrier_wait(&staged[part % 2 * Tile::groups + g], (use + part / 2) % 2);
            if (part == 0 && g == 0 && shape.across > 1) {
              while (ptx::load_acquire(counter + turn % 2) < (turn / 2 + 1) * team_blocks) __nanosleep(20);
              hopper::order_copies();
            }
            for (int box = 0; box < Tile::boxes; ++box) {
              const int x = column0 + (part * Tile::boxes + box) * Tile::wide, y = row + g * 64;
              if (x < shape.columns && y < shape.rows)
                hopper::store(out_map, out_part(part % 2, g) + box * Tile::box_bytes, x, y);
            }
          }
          hopper::commit_stores();
          if (part > 0) {
            hopper::wait_for_stores<1>();
            leave(part - 1);
          }
        }
        hopper::wait_for_stores<0>();
        leave(Tile::parts - 1);
        use += Tile::parts / 2;
      }
      // All of the team's reads are counted by now: what more is added to the first counter counts who leaves.
      if (shape.across > 1 && ptx::add_acquire_release(counter, 1) == ((turn + 1) / 2 + 1) * team_blocks - 1)
        counter[0] = counter[1] = 0;
    }
  } else {
    hopper::take_registers<Tile::groups == 1 ? 240 : 232>();
    const int warp = thread / 32, lane = thread % 32;
    float acc[Tile::columns / 2];  // of 64 rows
    float* const group_bias = biases + group * Tile::columns;
    unsigned n = 0, use = 0, turn = 0;
    const auto release = [&](int stage) {  // one thread for the group, each to another block
      if (thread < kPair) hopper::arrive_at(&empty[stage], thread);
    };
    for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
      for (int k = 0; k < shape.steps; ++k, ++n) {
        const int stage = n % Tile::stages;
        ptx::barrier_wait(&full[stage], n / Tile::stages % 2);
        hopper::pin(acc);
        hopper::begin_products();
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // 32 bytes of K each
          const uint64_t b = b_k_apart
                                 ? hopper::descriptor(b_tile(stage) + part * 16 * kRowBytes, Tile::wide * kRowBytes)
                                 : hopper::descriptor(b_tile(stage) + part * 32);
          const unsigned char* const rows = a_tile(stage) + group * 64 * kRowBytes;
          hopper::multiply<T, b_k_apart>(acc, hopper::descriptor(rows + part * 32), b, k > 0 || part > 0);
        }
        hopper::commit_products();
        if (k + 1 == shape.steps && threadIdx.x == 0) hopper::arrive(&received[turn % 2]);
        hopper::pin(acc);
        hopper::wait_for_products<1>();
        if (k > 0) release((n - 1) % Tile::stages);
      }
      hopper::wait_for_products<0>();
      hopper::pin(acc);
      release((n - 1) % Tile::stages);

      if (bias) {
        hopper::sync(1 + group, kGroup);  // the last pair's have been read
#pragma unroll
        for (int i = thread; i < Tile::columns; i += kGroup)
          group_bias[i] = column0 + i < shape.columns ? static_cast<float>(bias[column0 + i]) : 0;
        hopper::sync(1 + group, kGroup);
      }
      // Swizzled, so that the 8 rows that a warp writes at a time lie in different banks.
#pragma unroll
      for (int part = 0; part < Tile::parts; ++part) {
        const int buffer = part % 2;
        ptx::barrier_wait(&unstaged[buffer * Tile::groups + group], (use + part / 2) % 2 ^ 1);
#pragma unroll
        for (int box = 0; box < Tile::boxes; ++box) {
          unsigned char* const out = out_part(buffer, group) + box * Tile::box_bytes;
          float* const mine = acc + (part * Tile::boxes + box) * Tile::wide / 2;
          if (bias) {
#pragma unroll
            for (int j = 0; j < Tile::wide / 8; ++j) {
              const auto [left, right] = *reinterpret_cast<const float2*>(
                  group_bias + (part * Tile::boxes + box) * Tile::wide + 8 * j + 2 * (lane % 4));
              mine[4 * j] += left, mine[4 * j + 1] += right, mine[4 * j + 2] += left, mine[4 * j + 3] += right;
            }
          }
          if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int j = 0; j < Tile::wide / 8; ++j) {
              const int piece = 2 * j + lane % 4 / 2;
              unsigned char* const to =
                  out + (warp * 16 + lane / 4) * kRowBytes + (piece ^ lane / 4) * 16 + lane % 2 * 8;
              *reinterpret_cast<float2*>(to) = {mine[4 * j], mine[4 * j + 1]};
              *reinterpret_cast<float2*>(to + 8 * kRowBytes) = {mine[4 * j + 2], mine[4 * j + 3]};
            }
          } else {
#pragma unroll
            for (int j = 0; j < Tile::wide / 8; j += 2) {  // 16 rows of 16 columns: a lane names a row of 8 columns
              const int piece = j + lane / 16;
              hopper::store_matrices(
                  out + (warp * 16 + lane % 16) * kRowBytes + (piece ^ lane % 8) * 16,
                  hopper::two<T>(mine[4 * j], mine[4 * j + 1]), hopper::two<T>(mine[4 * j + 2], mine[4 * j + 3]),
                  hopper::two<T>(mine[4 * j + 4], mine[4 * j + 5]), hopper::two<T>(mine[4 * j + 6], mine[4 * j + 7]));
            }
          }
        }
        hopper::publish();
        __syncwarp();
        if (lane == 0) hopper::arrive(&staged[buffer * Tile::groups + group]);
      }
      use += Tile::parts / 2;
    }
  }
  __syncwarp();  // the warps of the fetching, the counting and the writing thread
  // The other block may still send to this block's barriers.
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

// The counters of this stream, or of this capture of a graph on this stream. Two launches of one captured node write
// over the same a: nobody runs them at once. None where all are taken.
std::optional<int> slot_of(cudaStream_t stream) {
  unsigned long long id = 0, capture = 0;
  cudaStreamCaptureStatus status;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  if (status == cudaStreamCaptureStatusActive) {
    id = reinterpret_cast<uintptr_t>(stream);  // its number is not to be had in a capture, and it lives to the end
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

struct Operands {
  at::Tensor a, b, bias;
  int64_t columns;
};

int up(int64_t x, int64_t y) { return static_cast<int>((x + y - 1) / y); }

template <class T, class Tile, bool b_k_apart>
struct Way {
  static constexpr auto kernel = inplace_mm_kernel<T, Tile, b_k_apart>;

  static cudaLaunchConfig_t config(cudaLaunchAttribute (&attributes)[2]) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {kPair, 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t c{};
    c.gridDim = dim3(kPair);
    c.blockDim = dim3(Tile::threads);
    c.dynamicSmemBytes = Tile::shared;
    c.attrs = attributes;
    c.numAttrs = 1;
    return c;
  }

  // Clusters that run at once, asked once a device.
  static int clusters() {
    static std::array<std::atomic<int>, 64> known{};
    auto& most = known[c10::cuda::current_device() % 64];
    if (most.load(std::memory_order_relaxed) == 0) {
      C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::shared));
      cudaLaunchAttribute attributes[2];
      const cudaLaunchConfig_t c = config(attributes);
      int fit = 0;
      C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &c));
      most.store(std::max(fit, 1), std::memory_order_relaxed);
    }
    return most.load(std::memory_order_relaxed);
  }

  int pairs, across, most, waves;

  explicit Way(const Operands& o)
      : pairs(up(o.a.size(0), kPair * Tile::rows)), across(up(o.columns, Tile::columns)), most(clusters() / across) {
    if (across > 1) most = std::min(most, kTeams);
    waves = most > 0 ? up(pairs, most) : 0;
  }
  // Cycles, roughly: a tile's last step and its way out, and `step` for each stage. 0: no team fits.
  double cost(double step, const Operands& o) const { return waves * (2000 + step * up(o.a.size(1), Tile::wide)); }

  bool launch(const Operands& o) const {
    const int64_t rows = o.a.size(0), inner = o.a.size(1);
    const Shape shape{static_cast<int>(rows), static_cast<int>(o.columns), pairs, across, up(inner, Tile::wide)};
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t c = config(attributes);
    c.gridDim = dim3(kPair * across * up(pairs, waves));
    c.stream = c10::cuda::getCurrentCUDAStream();
    std::optional<int> slot = 0;
    at::Tensor spare;
    if (across > 1) {
      c.numAttrs = 2;
      slot = slot_of(c.stream);
      if (!slot) spare = at::zeros({2 * kTeams}, o.a.options().dtype(at::kInt));
    }
    T* const data = o.a.mutable_data_ptr<T>();
    const CUtensorMap a_map = map_of<T>(data, rows, inner, o.a.stride(0), Tile::rows);
    const CUtensorMap b_map =
        b_k_apart ? map_of<T>(o.b.const_data_ptr<T>(), inner, o.columns, o.b.stride(0), Tile::wide)
                  : map_of<T>(o.b.const_data_ptr<T>(), o.columns, inner, o.b.stride(0), Tile::columns / kPair);
    const CUtensorMap out_map = map_of<T>(data, rows, o.columns, o.a.stride(0), 64);
    const cudaError_t launched = cudaLaunchKernelEx(
        &c, kernel, a_map, b_map, out_map, o.bias.defined() ? o.bias.const_data_ptr<T>() : nullptr, shape,
        spare.defined() ? reinterpret_cast<unsigned*>(spare.mutable_data_ptr<int>()) : nullptr, slot.value_or(0));
    if (launched == cudaErrorCooperativeLaunchTooLarge) {  // a part of the GPU alone is this process's
      (void)cudaGetLastError();
      return false;
    }
    C10_CUDA_CHECK(launched);
    return true;
  }
};

// Idle waves from which on panels through a workspace are faster: they reach 0.87 to 0.93 of cuBLAS at 16 bits, 0.49 to
// 0.58 in TF32 (H200).
template <class T>
constexpr double kPanels = sizeof(T) == 4 ? 1.7 : 1.15;

// Steps from which on a fourth stage is worth more than room for a whole tile on its way out: 0.999 of cuBLAS against
// 0.969 at 64 steps, 0.952 against 0.963 at 32 (H200).
constexpr int kDeep = 48;

template <class T, bool b_k_apart>
bool multiply(const Operands& o) {
  const Way<T, Tile<T, 2, 256, 3, 2>, b_k_apart> large(o);
  const Way<T, Tile<T, 2, 128, 6, 1>, b_k_apart> narrow(o);
  const Way<T, Tile<T, 1, 128, 8, 1>, b_k_apart> small(o);
  // 1024 cycles of products a stage of the large tile; the others wait for what they fetch, 24 and 16 KB.
  const double costs[3] = {large.cost(1024, o), narrow.cost(700, o), small.cost(450, o)};
  int best = -1;
  for (int i = 0; i < 3; ++i)
    if (costs[i] > 0 && (best < 0 || costs[i] < costs[best])) best = i;
  // Teams of many clusters leave the rest of the GPU idle.
  const int waves = up(int64_t{large.pairs} * large.across, large.clusters());
  if (best < 0 || (best == 0 && large.waves > kPanels<T> * waves)) return false;
  if (best > 0) return best == 1 ? narrow.launch(o) : small.launch(o);
  if (up(o.a.size(1), Tile<T, 2, 256, 3, 2>::wide) < kDeep) return large.launch(o);
  return Way<T, Tile<T, 2, 256, 4, 1>, b_k_apart>(o).launch(o);
}

// A matrix that a bulk copy can walk: its rows, side by side inside, all start on 16 bytes.
bool walkable(const at::Tensor& t) {
  const int64_t item = t.element_size();
  return t.stride(1) == 1 && t.stride(0) * item % 16 == 0 && t.stride(0) >= t.size(1) &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

}  // namespace

bool multiply_in_place_sm90(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb,
                            int64_t workspace) {
#ifdef MATMULS_SM90A
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  if (properties->major != 9 || properties->minor != 0 || encoder() == nullptr) return false;
  const bool tf32 = a.scalar_type() == at::kFloat;
  if (tf32 ? GemmTypes(at::kFloat).compute != CUBLAS_COMPUTE_32F_FAST_TF32
           : a.scalar_type() != at::kBFloat16 && a.scalar_type() != at::kHalf)
    return false;
  at::Tensor rows = transb ? b : b.t();  // [N, K]
  const int64_t columns = rows.size(0);
  // Bulk copies write 16 bytes at least.
  if (columns * rows.element_size() % 16 != 0 || a.size(0) > INT32_MAX / 2 || !walkable(a) ||
      (bias.defined() && bias.stride(0) != 1))
    return false;
  const bool k_apart = !tf32 && !walkable(rows) && walkable(rows.t());
  if (!k_apart && !walkable(rows)) {  // TF32 has no transposed operand
    if (rows.size(1) * rows.element_size() % 16 != 0 || rows.numel() * rows.element_size() > workspace) return false;
    rows = rows.clone(at::MemoryFormat::Contiguous);
  }
  const Operands o{a, k_apart ? rows.t() : rows, bias, columns};
  if (tf32) return multiply<float, false>(o);
  if (a.scalar_type() == at::kBFloat16)
    return k_apart ? multiply<c10::BFloat16, true>(o) : multiply<c10::BFloat16, false>(o);
  return k_apart ? multiply<c10::Half, true>(o) : multiply<c10::Half, false>(o);
#else
  return false;
#endif
}

}  // namespace matmuls
#endif
