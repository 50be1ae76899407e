// matmul_ of a few hundred rows on Hopper, in one wave: 64 x 64 numbers of the result a block.
//
// Two blocks of a cluster take two neighbouring panels of 64 rows and the same 64 columns: each fetches its own tiles
// of a and half of b's, which go to both. A panel may be written over once all blocks that read it, one for each 64
// columns, have their tiles of a: a counter in global memory says when. So tiles of a come first, all of them up to K =
// 1024 in 16 bits, and the panel's readers meet while b is still on its way.
//
// Nobody waits for a block that does not run: blocks of a cluster start together, and where several clusters share a
// panel the launch is a cooperative one, all of which the GPU starts or none.
#ifdef MATMULS_CUDA
#include "inplace_mm_sm90.cuh"

namespace matmuls::in_place {
namespace {

constexpr int kPair = 2, kSide = 64;  // blocks of a cluster; rows and columns of a tile
constexpr int kTileBytes = kSide * kRowBytes;
constexpr int kDeepA = 16, kDeepB = 10;   // tiles on their way
constexpr int kProducts = 2 * kGroup;     // threads that multiply, a warpgroup every other step of K
constexpr int kThreads = kProducts + 96;  // a warp for a's tiles, one for b's, one that counts
constexpr int kSumBytes = kSide * kSide * 4;
constexpr int kBarriers = 2 * (kDeepA + kDeepB) + 1;
constexpr int kShared = (kDeepA + kDeepB) * kTileBytes + kSumBytes + 8 * kBarriers;
static_assert(kShared <= kMaxShared);

struct Shape {
  int rows, columns, across, steps;  // tiles across the result, stages of K
  int64_t stride;                    // of a's rows
};

__device__ unsigned counters[kSlots][2 * kTeams];  // one a panel

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A ring of barriers for the tiles of one operand: tile n uses place n % deep.
template <int deep>
struct Ring {
  uint64_t *full, *empty;
  __device__ void wait_full(int n) const { ptx::barrier_wait(&full[n % deep], n / deep % 2); }
  __device__ void wait_empty(int n) const { ptx::barrier_wait(&empty[n % deep], n / deep % 2 ^ 1); }
};
#endif

template <class T, bool b_k_apart>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, T* a,
                    const T* bias, const Shape shape, unsigned* spare, int slot) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool turned = kTurned<T, b_k_apart>;
  constexpr int wide = kRowBytes / sizeof(T);  // columns of a box, and K of a stage
  extern __shared__ __align__(1024) unsigned char tiles[];
  float4* const sums = reinterpret_cast<float4*>(tiles + (kDeepA + kDeepB) * kTileBytes);  // [giver][four][thread]
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(sums + kSumBytes / 16);
  const Ring<kDeepA> ring_a{barriers, barriers + kDeepA};
  const Ring<kDeepB> ring_b{barriers + 2 * kDeepA, barriers + 2 * kDeepA + kDeepB};
  uint64_t* const free_panel = barriers + 2 * (kDeepA + kDeepB);
  const auto a_tile = [&](int n) { return tiles + n % kDeepA * kTileBytes; };
  const auto b_tile = [&](int n) { return tiles + (kDeepA + n % kDeepB) * kTileBytes; };

  const int rank = ptx::cluster_rank(), cluster = blockIdx.x / kPair;
  const int panel = cluster / shape.across * kPair + rank, row0 = panel * kSide;
  const int column0 = cluster % shape.across * kSide;
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup, warp = thread / 32, lane = thread % 32;
  if (threadIdx.x == kProducts) {
    hopper::prefetch(a_map);
    hopper::prefetch(b_map);
    for (int s = 0; s < kDeepA; ++s) {
      ptx::barrier_init(&ring_a.full[s]);
      ptx::barrier_init(&ring_a.empty[s], 2);  // who multiplies and who counts
    }
    for (int s = 0; s < kDeepB; ++s) {
      ptx::barrier_init(&ring_b.full[s]);
      ptx::barrier_init(&ring_b.empty[s], kPair);
    }
    ptx::barrier_init(free_panel);
    ptx::barrier_fence();
  }
  __syncthreads();
  ptx::cluster_arrive();
  hopper::after_the_launch_before();
  hopper::let_the_next_launch();

  if (threadIdx.x == kProducts) {  // fetches a
    for (int n = 0; n < shape.steps; ++n) {
      if (n >= kDeepA) ring_a.wait_empty(n);
      ptx::barrier_expect(&ring_a.full[n % kDeepA], kTileBytes);
      hopper::load(a_map, a_tile(n), &ring_a.full[n % kDeepA], n * wide, row0);
    }
  }
  if (threadIdx.x / 32 == kProducts / 32 + 1) {
    ptx::cluster_wait();  // the other block's barriers are there
    if (lane == 0) {      // fetches b: half of it for both
      for (int n = 0; n < shape.steps; ++n) {
        if (n >= kDeepB) ring_b.wait_empty(n);
        uint64_t* const full = &ring_b.full[n % kDeepB];
        ptx::barrier_expect(full, kTileBytes);
        unsigned char* const to = b_tile(n) + rank * kTileBytes / kPair;
        constexpr uint16_t both = (1 << kPair) - 1;
        if constexpr (turned)
          hopper::load_for(both, b_map, to, full, column0 + rank * wide, n * wide);
        else if constexpr (b_k_apart)
          hopper::load_for(both, b_map, to, full, column0, n * wide + rank * wide / kPair);
        else
          hopper::load_for(both, b_map, to, full, n * wide, column0 + rank * kSide / kPair);
      }
    }
  } else if (threadIdx.x == kProducts + 64) {  // counts
    const unsigned readers = shape.across;
    unsigned* const counter = (spare ? spare : counters[slot]) + panel;
    for (int n = 0; n < shape.steps; ++n) {
      ring_a.wait_full(n);
      hopper::arrive(&ring_a.empty[n % kDeepA]);
    }
    if (readers > 1) {
      // Nothing that others wrote is read from here on, and what has been read does not change: no fence.
      ptx::increment(counter, 2 * readers - 1);  // back to zero when all have left
      while (ptx::load_relaxed(counter) < readers) {
      }
      ptx::increment(counter, 2 * readers - 1);
    }
    hopper::arrive(free_panel);
  } else if (threadIdx.x < kProducts) {
    float acc[kSide / 2];
#pragma unroll
    for (float& x : acc) x = 0;
    // Turned, as in inplace_mm_sm90.cu: this thread's columns of the result, one in a warp's first eight and one in its
    // second, 32 in two warps.
    const auto place = [&](int h) { return 2 * warp % 4 + h ^ lane / 16 * 5; };
    // The columns that this thread writes: of both halves of a turned tile's rows two, else eight of a half's.
    const auto column_of = [&](int i) {
      return column0 + (turned ? warp / 2 * 32 + 4 * place(i) + lane / 4 % 4
                               : group * kSide / 2 + i / 2 * 8 + 2 * (lane % 4) + i % 2);
    };
    float beside[8] = {};  // on its way meanwhile
    if (bias) {
#pragma unroll
      for (int i = 0; i < (turned ? 2 : 8); ++i)
        if (column_of(i) < shape.columns) beside[i] = static_cast<float>(bias[column_of(i)]);
    }
    const auto fragments = [&](uint32_t (&fragment)[4][4], int n) {
      ring_a.wait_full(n);
      ring_b.wait_full(n);
      hopper::fragments_of(fragment, b_tile(n) + warp / 2 * 32 * kRowBytes, place(0), place(1), lane);
    };
    const auto release = [&](int n) {  // of b to both blocks
      if (thread < kPair) hopper::arrive_at(&ring_b.empty[n % kDeepB], thread);
      if (thread == kPair) hopper::arrive(&ring_a.empty[n % kDeepA]);
    };
    const auto step = [&](int n, uint32_t (&fragment)[4][4], uint32_t (&next)[4][4]) {
      if constexpr (!turned) {
        ring_a.wait_full(n);
        ring_b.wait_full(n);
      }
      hopper::pin(acc);
      hopper::begin_products();
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // 32 bytes of K each
        const uint64_t rows = hopper::descriptor(a_tile(n) + part * 32);
        if constexpr (turned)
          hopper::multiply_fragment<float, false>(acc, fragment[part], rows, true);
        else
          hopper::multiply<T, b_k_apart>(
              acc, rows, hopper::descriptor(b_tile(n) + part * (b_k_apart ? 16 * kRowBytes : 32)), true);
      }
      hopper::commit_products();
      hopper::pin(acc);
      if constexpr (turned) {
        if (n + 2 < shape.steps) fragments(next, n + 2);
        hopper::wait_for_products<0>();
        hopper::pin(acc);
        release(n);
      } else {
        hopper::wait_for_products<1>();
        if (n > 1) release(n - 2);
      }
    };
    uint32_t even[4][4], odd[4][4];  // of b, for a step in flight and the next one
    if constexpr (turned) {
      if (group < shape.steps) fragments(even, group);
      for (int n = group; n < shape.steps; n += 4) {
        step(n, even, odd);
        if (n + 2 < shape.steps) step(n + 2, odd, even);
      }
    } else {
      for (int n = group; n < shape.steps; n += 2) step(n, even, odd);
      hopper::wait_for_products<0>();
      hopper::pin(acc);
    }

    // Each warpgroup gives the other one half of its sums, and writes its own half.
    const auto fours = [&](int of) { return sums + of * kSumBytes / 32 + thread; };
    float mine[kSide / 4];
#pragma unroll
    for (int to = 0; to < 2; ++to) {
      const float* const half = acc + to * kSide / 4;
      if (to == group) {
#pragma unroll
        for (int i = 0; i < kSide / 4; ++i) mine[i] = half[i];
      } else {
#pragma unroll
        for (int i = 0; i < kSide / 16; ++i)
          fours(group)[i * kGroup] = {half[4 * i], half[4 * i + 1], half[4 * i + 2], half[4 * i + 3]};
      }
    }
    hopper::sync(1, kProducts);
#pragma unroll
    for (int i = 0; i < kSide / 16; ++i) {
      const float4 sum = fours(1 - group)[i * kGroup];
      mine[4 * i] += sum.x, mine[4 * i + 1] += sum.y, mine[4 * i + 2] += sum.z, mine[4 * i + 3] += sum.w;
    }
    ptx::barrier_wait(free_panel, 0);
    // Four numbers of each of four eights: two neighbours, and the two eight rows below them, or eight columns beside.
#pragma unroll
    for (int j = 0; j < kSide / 16; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float left = mine[4 * j + 2 * h], right = mine[4 * j + 2 * h + 1];
        if constexpr (turned) {
          const int row = row0 + group * kSide / 2 + 8 * j + 2 * (lane % 4), column = column_of(h);
          T* const to = a + row * shape.stride + column;
          if (column < shape.columns && row < shape.rows) *to = left + beside[h];
          if (column < shape.columns && row + 1 < shape.rows) to[shape.stride] = right + beside[h];
        } else {
          const int row = row0 + warp * 16 + lane / 4 + 8 * h, column = column_of(2 * j);
          if (row >= shape.rows || column >= shape.columns) continue;
          T* const to = a + row * shape.stride + column;
          const float x = left + beside[2 * j], y = right + beside[2 * j + 1];
          if constexpr (sizeof(T) == 4)
            *reinterpret_cast<float2*>(to) = {x, y};
          else
            *reinterpret_cast<uint32_t*>(to) = hopper::two<T>(x, y);
        }
      }
  }
  // The other block may still send arrivals here.
  __syncwarp();
  if (threadIdx.x / 32 != kProducts / 32 + 1) ptx::cluster_wait();
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- launch

template <class T, bool b_k_apart>
bool multiply_few_rows(const Operands& o) {
  constexpr auto kernel = few_rows_kernel<T, b_k_apart>;
  constexpr int wide = kRowBytes / sizeof(T);
  const int64_t rows = o.a.size(0), inner = o.a.size(1);
  const int pairs = up(rows, kPair * kSide), across = up(o.columns, kSide);
  if (pairs * across > clusters_of<kernel>(kPair, kThreads, kShared) || pairs > kTeams) return false;
  const Shape shape{static_cast<int>(rows), static_cast<int>(o.columns), across, up(inner, wide), o.a.stride(0)};
  T* const data = o.a.mutable_data_ptr<T>();
  const CUtensorMap a_map = map_of<T>(data, rows, inner, o.a.stride(0), kSide);
  const CUtensorMap b_map = b_k_apart
                                ? map_of<T>(o.b.const_data_ptr<T>(), inner, o.columns, o.b.stride(0), 32)
                                : map_of<T>(o.b.const_data_ptr<T>(), o.columns, inner, o.b.stride(0), kSide / kPair);
  const Counters counters(c10::cuda::getCurrentCUDAStream(), o.a);
  return Launch(kPair, kThreads, kShared)
      .start(kernel, pairs * across, across > 1, a_map, b_map, data,
             o.bias.defined() ? o.bias.const_data_ptr<T>() : nullptr, shape, counters.own(), counters.slot.value_or(0));
}

template bool multiply_few_rows<float, false>(const Operands&);
template bool multiply_few_rows<float, true>(const Operands&);
template bool multiply_few_rows<c10::BFloat16, false>(const Operands&);
template bool multiply_few_rows<c10::BFloat16, true>(const Operands&);
template bool multiply_few_rows<c10::Half, false>(const Operands&);
template bool multiply_few_rows<c10::Half, true>(const Operands&);

}  // namespace matmuls::in_place
#endif
