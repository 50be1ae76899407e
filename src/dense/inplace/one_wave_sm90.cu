// matmul_ of 16-bit matrices on Hopper in one wave of large tiles: a <- a @ op(b) + bias over a's own rows.
//
// A cluster of two blocks, one above the other, computes 768 x 128 results and ends. Each block loads its own 384 rows
// of a and half of b's tile, which is multicast to both:
//
//                       columns 0 to 127   | columns 128 to 255 | ...
//    rows   0 to 383    cluster 0, block 0 | cluster 1, block 0 |       one panel
//    rows 384 to 767    cluster 0, block 1 | cluster 1, block 1 |       one panel
//
// A block has four warpgroups:
//
//    loading warp    a and b of step n --> stage n % 3, up to three steps ahead
//    3 warpgroups    128 x 128 results each --> 16 bits, over their own rows of a in stages 0 and 1 --> TMA stores
//    counting warp   last tile of a received --> counter of the panel --> all blocks of the panel: stores may start
//
// A panel may be overwritten once all blocks across have received their last tiles of it. No block waits for one that
// is not running: blocks of a cluster start together, and if several clusters share a panel the launch is cooperative,
// so the GPU starts all blocks or none.
#ifdef __CUDACC__
#include "dense/inplace/panels_sm90.cuh"

namespace matmuls::in_place {
namespace {

constexpr int kRows = kOneWave.rows, kColumns = kOneWave.columns;  // of the result, per block
constexpr int kGroups = 3;                                         // warpgroups that multiply
constexpr int kGroupRows = kRows / kGroups;
constexpr int kHigh = 64;   // rows of a wgmma
constexpr int kHalf = 64;   // columns: half of b's tile, a box of 16-bit elements
constexpr int kStages = 3;  // of 128 bytes of K
constexpr int kThreads = (kGroups + 1) * kGroup;
constexpr int kGroupBytes = kGroupRows * kRowBytes;  // a warpgroup's rows of a, and half of its results
constexpr int kBytesA = kRows * kRowBytes, kBytesB = kColumns * kRowBytes, kStageBytes = kBytesA + kBytesB;
constexpr int kBarriers = (kGroups + 2) * kStages + 2;
constexpr int kShared = kStages * kStageBytes + kGroups * kColumns * static_cast<int>(sizeof(float)) + 8 * kBarriers;
constexpr int kLoadRegisters = 32, kProductRegisters = 160;
static_assert(kShared <= kMaxShared && kColumns == kPair * kHalf);
static_assert(kColumns == kGroup && kStages >= kColumns / kHalf);  // a thread's bias; chunk c of the results in stage c
static_assert(kGroup * (kLoadRegisters + kGroups * kProductRegisters) <= 65536);

struct Shape {
  int rows, columns, across, steps;  // tiles across the result, K stages
};

__device__ unsigned counters[kSlots][2 * kTeams];  // one per panel

template <class T, bool b_k_apart>
__global__ void __launch_bounds__(kThreads, 1)
    one_wave_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                    const __grid_constant__ CUtensorMap out_map, const T* bias, const Shape shape, unsigned* spare,
                    int slot) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int wide = kRowBytes / sizeof(T);  // columns of a box, and K of a stage
  static_assert(wide == kHalf);
  extern __shared__ __align__(1024) unsigned char tiles[];
  float* const biases = reinterpret_cast<float*>(tiles + kStages * kStageBytes);  // [group][column]
  // A warpgroup multiplies as soon as its own rows of a have arrived.
  uint64_t* const full_a = reinterpret_cast<uint64_t*>(biases + kGroups * kColumns);  // [stage][group]
  uint64_t* const full_b = full_a + kStages * kGroups;
  uint64_t* const empty = full_b + kStages;
  uint64_t* const received = empty + kStages;  // all tiles of a have arrived
  uint64_t* const free_panel = received + 1;   // in all blocks of the panel
  const auto a_rows = [&](int stage, int group) { return tiles + stage * kStageBytes + group * kGroupBytes; };
  const auto b_tile = [&](int stage) { return tiles + stage * kStageBytes + kBytesA; };

  const int rank = ptx::cluster_rank(), cluster = blockIdx.x / kPair;
  const int panel = cluster / shape.across * kPair + rank;
  const int row0 = panel * kRows, column0 = cluster % shape.across * kColumns;
  const bool meet = shape.across > 1;  // a block alone in its panel needs no counter
  // Uniform within a warp, which the compiler knows only of a shuffle's result.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int thread = threadIdx.x % kGroup;
  if (threadIdx.x == 0) {
    hopper::prefetch(a_map);
    hopper::prefetch(b_map);
    hopper::prefetch(out_map);
    for (int s = 0; s < kStages; ++s) {
      for (int g = 0; g < kGroups; ++g) ptx::barrier_init(&full_a[s * kGroups + g]);
      ptx::barrier_init(&full_b[s]);
      ptx::barrier_init(&empty[s], kPair * kGroups);
    }
    ptx::barrier_init(received, kGroups);
    ptx::barrier_init(free_panel);
    ptx::barrier_fence();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the other block's barriers are initialized
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // Both blocks count their steps alike: step n uses stage n % kStages.
  if (group == kGroups) {
    hopper::setmaxnreg_dec<kLoadRegisters>();
    if (thread == 0) {  // loading thread
      for (int n = 0; n < shape.steps; ++n) {
        const int stage = n % kStages;
        // Both blocks must have read this stage: half of b goes to both.
        ptx::barrier_wait(&empty[stage], n / kStages % 2 ^ 1);
        constexpr uint16_t both = (1 << kPair) - 1;
        const int k = n * wide, column = column0 + rank * kHalf;
        ptx::barrier_expect(&full_b[stage], kBytesB);
        hopper::load_for(both, b_map, b_tile(stage) + rank * (kBytesB / kPair), &full_b[stage], b_k_apart ? column : k,
                         b_k_apart ? k : column);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          uint64_t* const full = &full_a[stage * kGroups + g];
          ptx::barrier_expect(full, kGroupBytes);
          hopper::load(a_map, a_rows(stage, g), full, k, row0 + g * kGroupRows);
        }
      }
    } else if (thread == 32 && meet) {  // counting thread
      const unsigned readers = shape.across;
      unsigned* const counter = (spare ? spare : counters[slot]) + panel;
      ptx::barrier_wait(received, 0);
      // No data of others is read from here on, and what has been read does not change: no fence is needed.
      ptx::increment(counter, 2 * readers - 1);  // reset to zero when all have left
      while (ptx::load_relaxed(counter) < readers) {
      }
      ptx::increment(counter, 2 * readers - 1);
      ptx::barrier_arrive(free_panel);
    }
  } else {
    hopper::setmaxnreg_inc<kProductRegisters>();
    float own_bias = 0;  // loaded during the products
    if (bias && column0 + thread < shape.columns) own_bias = static_cast<float>(bias[column0 + thread]);
    const int warp = thread / 32, lane = thread % 32;
    float acc[kGroupRows / kHigh][kColumns / 2];
    const auto pin = [&] {
      hopper::pin(acc[0]);
      hopper::pin(acc[1]);
    };
    for (int n = 0; n < shape.steps; ++n) {
      const int stage = n % kStages;
      ptx::barrier_wait(&full_b[stage], n / kStages % 2);
      ptx::barrier_wait(&full_a[stage * kGroups + group], n / kStages % 2);
      pin();
      hopper::begin_products();
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // 32 bytes of K each
        const uint64_t columns = b_k_apart ? hopper::descriptor(b_tile(stage) + part * 16 * kRowBytes, kBytesB / kPair)
                                           : hopper::descriptor(b_tile(stage) + part * 32);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          hopper::multiply<T, b_k_apart>(
              acc[half], hopper::descriptor(a_rows(stage, group) + half * kHigh * kRowBytes + part * 32), columns,
              n > 0 || part > 0);
      }
      hopper::commit_products();
      if (n + 1 == shape.steps && thread == 0) ptx::barrier_arrive(received);
      pin();
      hopper::wait_for_products<1>();
      if (n > 0 && thread < kPair) hopper::arrive_at(&empty[(n - 1) % kStages], thread);
    }
    hopper::wait_for_products<0>();
    pin();

    // The results go to the warpgroup's own rows of a in stages 0 and 1, 64 columns each. No other warpgroup read these
    // rows, a warp writes those that it multiplied, and all loads into them have arrived.
    float* const own_biases = biases + group * kColumns;
    if (bias) {
      own_biases[thread] = own_bias;
      hopper::sync(1 + group, kGroup);
    }
    const auto words = [&](int half, int j, uint32_t& upper, uint32_t& lower) {  // 8 columns from 8 j: rows, rows + 8
      const float* const four = acc[half] + 4 * j;
      const auto [left, right] =
          bias ? *reinterpret_cast<const float2*>(own_biases + 8 * j + 2 * (lane % 4)) : float2{0, 0};
      upper = hopper::two<T>(four[0] + left, four[1] + right);
      lower = hopper::two<T>(four[2] + left, four[3] + right);
    };
#pragma unroll
    for (int chunk = 0; chunk < kColumns / wide; ++chunk) {
      unsigned char* const out = a_rows(chunk, group);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < wide / 8; j += 2) {  // 16 rows of 16 columns: each lane passes 8 columns of a row
          uint32_t w[4];
          words(half, chunk * (wide / 8) + j, w[0], w[1]);
          words(half, chunk * (wide / 8) + j + 1, w[2], w[3]);
          const int row = half * kHigh + warp * 16 + lane % 16;
          hopper::store_matrices(out + row * kRowBytes + ((j + lane / 16) ^ lane % 8) * 16, w[0], w[1], w[2], w[3]);
        }
      hopper::publish();
      hopper::sync(1 + group, kGroup);
      if (thread == 0) {
        if (chunk == 0 && meet) {
          ptx::barrier_wait(free_panel, 0);
          hopper::order_copies();
        }
        const int x = column0 + chunk * wide, y = row0 + group * kGroupRows;
        if (x < shape.columns && y < shape.rows) hopper::store(out_map, out, x, y);
        hopper::commit_stores();
      }
      __syncwarp();
    }
    if (thread == 0) hopper::wait_for_stores<0>();
  }
  __syncwarp();
  // The other block may still signal this block's barriers.
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
#endif
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- launch

template <class T, bool b_k_apart>
bool one_wave_fits(const Operands& o) {
  const int pairs = up(o.a.size(0), kPair * kRows), across = up(o.columns, kColumns);
  return (across == 1 || pairs <= kTeams) &&
         int64_t{pairs} * across <= clusters_at_once<one_wave_kernel<T, b_k_apart>, kThreads, kShared>(kPair);
}

template <class T, bool b_k_apart>
bool multiply_one_wave(const Operands& o) {
  constexpr auto kernel = one_wave_kernel<T, b_k_apart>;
  constexpr int wide = kRowBytes / sizeof(T);
  const int64_t rows = o.a.size(0), inner = o.a.size(1);
  const int across = up(o.columns, kColumns), clusters = up(rows, kPair * kRows) * across;
  const Shape shape{static_cast<int>(rows), static_cast<int>(o.columns), across, up(inner, wide)};
  T* const data = o.a.mutable_data_ptr<T>();
  const CUtensorMap a_map = map_of<T>(data, rows, inner, o.a.stride(0), kGroupRows);
  const CUtensorMap b_map = b_k_apart ? map_of<T>(o.b.const_data_ptr<T>(), inner, o.columns, o.b.stride(0), wide)
                                      : map_of<T>(o.b.const_data_ptr<T>(), o.columns, inner, o.b.stride(0), kHalf);
  const CUtensorMap out_map = map_of<T>(data, rows, o.columns, o.a.stride(0), kGroupRows);
  std::optional<Counters> counters;
  if (across > 1) counters.emplace(c10::cuda::getCurrentCUDAStream(), o.a);
  Launch launch(clusters * kPair, kThreads, kShared);
  return start(launch, across > 1, kPair, kernel, a_map, b_map, out_map,
               o.bias.defined() ? o.bias.const_data_ptr<T>() : nullptr, shape, counters ? counters->own() : nullptr,
               counters ? counters->slot.value_or(0) : 0);
}

// Both, for both layouts of b.
#define MATMULS_ONE_WAVE(T)                                   \
  template bool one_wave_fits<T, false>(const Operands&);     \
  template bool one_wave_fits<T, true>(const Operands&);      \
  template bool multiply_one_wave<T, false>(const Operands&); \
  template bool multiply_one_wave<T, true>(const Operands&);
MATMULS_ONE_WAVE(c10::BFloat16)
MATMULS_ONE_WAVE(c10::Half)
#undef MATMULS_ONE_WAVE

}  // namespace matmuls::in_place
#endif
