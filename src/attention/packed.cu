// attend_packed (packed.h) on a GPU: a block computes 64 queries of one head, and passes over their keys once.
//
//   keys of a segment   | 0 ... 63 | 64 ... 127 | ...    shared memory holds K and V of 64 keys, and of the next 64
//                         K0  V0     K1  V1              while those are copied
//   warp 0   q, largest score, sum, context  in registers, of 16 queries
//   warp 1   for each tile:  S = q K^T,  P = 2^(S - largest),  context = context 2^(largest before - largest) + P V
//   warp 2
//   warp 3
#ifdef __CUDACC__
#include <ATen/core/Tensor.h>

#include <limits>

#include "attention/packed.h"
#include "glue/handles.h"
#include "gpu/launch.cuh"
#include "gpu/vector_io.cuh"

namespace matmuls::packed {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kKeys = 64;  // of a tile
// Queries of a block. With 32 a warp it took 0.92 to 1.56 times as long (H200), less only for texts of 512 tokens or
// more, which varlen_attn computes faster.
constexpr int kQueries = 16 * kWarps;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Rows in shared memory are 16 bytes apart, so that the 8 rows of a matrix of ldmatrix are in different banks.
template <int D>
constexpr int kRowBytes = 2 * D + 16;
template <int D>
constexpr int kShared = (kQueries + 4 * kKeys) * kRowBytes<D>;

// Starts to copy `rows` rows of a head, zeros after the first `count`, to shared memory.
template <int D, int rows>
__device__ void copy_rows(uint8_t* to, const Heads& from, int head, int first, int count) {
  constexpr int kChunks = D / 8;
  static_assert(rows * kChunks % kThreads == 0);
  const auto* const start = static_cast<const uint16_t*>(from.data) + first * from.row + head * from.head;
#pragma unroll
  for (int j = 0; j < rows * kChunks / kThreads; ++j) {
    const int i = j * kThreads + static_cast<int>(threadIdx.x), row = i / kChunks, chunk = i % kChunks;
    ptx::cp_async_or_zero(to + row * kRowBytes<D> + 16 * chunk, start + row * from.row + 8 * chunk, row < count);
  }
}

// The keys from `first` to `end` that a query sees.
struct KeyRange {
  int keys, shift, left, right;  // shift: keys minus queries

  __device__ int first(int query) const { return left < 0 ? 0 : max(0, query + shift - left); }
  __device__ int end(int query) const { return right < 0 ? keys : max(0, min(keys, query + shift + right + 1)); }
};

// 16 queries of a warp. Each thread has parts of the rows lane / 4 + 8 r, r = 0, 1.
template <class T, int D>
struct Queries {
  static constexpr bool kBfloat16 = std::is_same_v<T, c10::BFloat16>;
  uint32_t q[D / 16][4];
  float context[D / 8][4]{}, most[2], sum[2]{};  // most: scale times the largest score
  int first[2], end[2];                          // keys that the thread's queries see

  // start: the warp's first query. `tile`: its rows in shared memory.
  __device__ Queries(const KeyRange& seen, int start) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = start + 8 * r + static_cast<int>(threadIdx.x) % 32 / 4;
      most[r] = kNone, first[r] = seen.first(query), end[r] = seen.end(query);
    }
  }
  __device__ void load(const uint8_t* tile) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = ptx::shared_address(tile) + lane % 16 * kRowBytes<D> + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) ptx::ldmatrix_x4(row + 32 * k, q[k]);
  }

  // Scores of `keys` keys in shared memory, as probabilities relative to the largest so far: p. `from`: the first key.
  template <int keys>
  __device__ void weigh(const uint8_t* tile, int from, bool masked, float scale, uint32_t (&p)[kKeys / 16][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = ptx::shared_address(tile) + (lane % 8 + lane / 16 * 8) * kRowBytes<D> + lane / 8 % 2 * 16;
    float s[keys / 8][4]{};
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int n = 0; n < keys / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4(row + 16 * n * kRowBytes<D> + 32 * k, b);
        ptx::mma<kBfloat16>(s[2 * n], q[k], b[0], b[1]);
        ptx::mma<kBfloat16>(s[2 * n + 1], q[k], b[2], b[3]);
      }
    if (masked) mask(s, from + lane % 4 * 2);
    exponentiate(s, scale);
#pragma unroll
    for (int n = 0; n < keys / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = two(s[2 * n + i / 2][i % 2 * 2], s[2 * n + i / 2][i % 2 * 2 + 1]);
  }

  // context += p V, of `keys` keys in shared memory.
  template <int keys>
  __device__ void add(const uint8_t* tile, const uint32_t (&p)[kKeys / 16][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = ptx::shared_address(tile) + lane % 16 * kRowBytes<D> + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < keys / 16; ++n)
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        uint32_t b[4];
        ptx::ldmatrix_x4<true>(row + 16 * n * kRowBytes<D> + 32 * d, b);
        ptx::mma<kBfloat16>(context[2 * d], p[n], b[0], b[1]);
        ptx::mma<kBfloat16>(context[2 * d + 1], p[n], b[2], b[3]);
      }
  }

  // Divides by the sums, and stores the first `count` rows by way of the warp's rows in shared memory.
  __device__ void store(uint8_t* tile, T* to, int64_t stride, int count) {
    constexpr int kChunks = D / 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float total = over_quad(sum[r], [](float a, float b) { return a + b; });
      const float factor = total == 0 ? 1.0f : 1.0f / total;
      const uint32_t row = ptx::shared_address(tile) + (8 * r + lane / 4) * kRowBytes<D> + lane % 4 * 4;
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        ptx::store_shared(row + 16 * d, two(context[d][2 * r] * factor, context[d][2 * r + 1] * factor));
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16 * kChunks / 32; ++j) {
      const int row = (32 * j + lane) / kChunks, chunk = (32 * j + lane) % kChunks;
      if (row < count)
        ptx::store(to + row * stride + 8 * chunk, *reinterpret_cast<uint4*>(tile + row * kRowBytes<D> + 16 * chunk));
    }
  }

 private:
  static __device__ uint32_t two(float left, float right) {
    const float values[2] = {left, right};
    return pack<T, 2>(values).at[0];
  }
  template <class Merge>
  static __device__ float over_quad(float x, const Merge& merge) {
    x = merge(x, __shfl_xor_sync(~0u, x, 1));
    return merge(x, __shfl_xor_sync(~0u, x, 2));
  }
  template <int N>
  __device__ void mask(float (&s)[N][4], int key) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = key + 8 * n + i % 2;
        if (own < first[i / 2] || own >= end[i / 2]) s[n][i] = kNone;
      }
  }
  // s <- 2^(scale (s - largest)); what was summed before is scaled to the new largest score: by exactly 1 if that is
  // the same, since factors of 1 + 1e-4 for each tile add up.
  template <int N>
  __device__ void exponentiate(float (&s)[N][4], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = kNone;
#pragma unroll
      for (int n = 0; n < N; ++n) now = fmaxf(now, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      now = fmaxf(most[r], scale * over_quad(now, [](float a, float b) { return fmaxf(a, b); }));
      const float base = now == kNone ? 0.0f : now;  // -inf - -inf would be NaN
      const float before = ptx::exp2_approx(most[r] - base);
      most[r] = now;
      sum[r] *= before;
#pragma unroll
      for (int d = 0; d < D / 8; ++d) context[d][2 * r] *= before, context[d][2 * r + 1] *= before;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          s[n][i] = ptx::exp2_approx(fmaf(s[n][i], scale, -base));
          sum[r] += s[n][i];
        }
    }
  }
};

template <class T, int D>
__global__ void __launch_bounds__(kThreads, D <= 64 ? 4 : 2)
    attend_packed_kernel(const __grid_constant__ Call call, int tiles) {
  extern __shared__ __align__(16) uint8_t shared[];
  constexpr int kTile = kKeys * kRowBytes<D>;
  const int head = static_cast<int>(blockIdx.x) / tiles % call.heads, warp = static_cast<int>(threadIdx.x) / 32;
  const int segment = static_cast<int>(blockIdx.x) / tiles / call.heads;
  const int block = static_cast<int>(blockIdx.x) % tiles * kQueries, start = block + warp * 16;  // first queries
  uint8_t *const k_tiles = shared + kQueries * kRowBytes<D>, *const v_tiles = k_tiles + 2 * kTile;
  uint8_t* const own = shared + warp * 16 * kRowBytes<D>;  // the warp's queries, then their context
  ptx::griddepcontrol_launch_dependents();                 // PDL: the next kernel may start here, and waits in turn
  ptx::griddepcontrol_wait();
  const int first_row = call.queries[segment], queries = call.queries[segment + 1] - first_row;
  const int first_key = call.keys[segment], keys = call.keys[segment + 1] - first_key;
  if (block >= queries) return;
  const KeyRange seen{keys, keys - queries, call.left, call.right};
  const int from = seen.first(block), end = seen.end(min(block + kQueries, queries) - 1);
  const auto copy = [&](uint8_t* tiles_of, const Heads& heads, int key, int stage) {
    if (key < end)
      copy_rows<D, kKeys>(tiles_of + stage * kTile, heads, head / call.sharing, first_key + key, keys - key);
    ptx::cp_async_commit_group();
  };
  if (from < end) copy_rows<D, kQueries>(shared, call.q, head, first_row + block, queries - block);
  copy(k_tiles, call.k, from, 0);
  copy(v_tiles, call.v, from, 0);
  Queries<T, D> mine(seen, start);
  int stage = 0;
  for (int key = from; key < end; key += kKeys, stage ^= 1) {
    const bool narrow = end - key <= kKeys / 2, busy = start < queries;
    const int width = narrow ? kKeys / 2 : kKeys;
    const bool masked = key + width > seen.end(start) || key < seen.first(start + 15);
    ptx::cp_async_wait_group<1>();  // K
    __syncthreads();                // of all threads; and the other stage has been read
    if (key == from) mine.load(own);
    copy(k_tiles, call.k, key + kKeys, stage ^ 1);
    copy(v_tiles, call.v, key + kKeys, stage ^ 1);
    uint32_t p[kKeys / 16][4];
    if (busy && narrow) mine.template weigh<kKeys / 2>(k_tiles + stage * kTile, key, masked, call.scale, p);
    if (busy && !narrow) mine.template weigh<kKeys>(k_tiles + stage * kTile, key, masked, call.scale, p);
    ptx::cp_async_wait_group<2>();  // V
    __syncthreads();
    if (busy && narrow) mine.template add<kKeys / 2>(v_tiles + stage * kTile, p);
    if (busy && !narrow) mine.template add<kKeys>(v_tiles + stage * kTile, p);
  }
  if (start >= queries) return;
  const int64_t stride = int64_t{call.heads} * D;
  mine.store(own, static_cast<T*>(call.context) + (first_row + start) * stride + head * D, stride, queries - start);
}

template <class T, int D>
void launch(const Call& call) {
  constexpr auto kernel = attend_packed_kernel<T, D>;
  allow_shared_memory<kernel>();
  const int tiles = up(call.longest, kQueries);
  const int64_t blocks = int64_t{tiles} * call.heads * call.segments;
  TORCH_CHECK(blocks <= INT32_MAX, "attend_packed: expected at most 2^31 blocks of queries, got ", blocks);
  Launch launch(static_cast<unsigned>(blocks), kThreads, kShared<D>);
  launch.programmatic();
  launch(kernel, call, tiles);
}

template <class T>
void with_head(int64_t head, const Call& call) {
  switch (head) {
    case 32: return launch<T, 32>(call);
    case 64: return launch<T, 64>(call);
    case 80: return launch<T, 80>(call);
    case 96: return launch<T, 96>(call);
    case 128: return launch<T, 128>(call);
    default: TORCH_CHECK(false, "attend_packed: expected heads of 32, 64, 80, 96 or 128 on a GPU, got ", head);
  }
}

}  // namespace

void attend_on_gpu(const at::Tensor& q, const Call& call) {
  const OperationGuard guard("attend_packed", q);
  TORCH_CHECK(device_limits().major >= 8, "attend_packed: expected a GPU of capability 8.0 or later");
  q.scalar_type() == at::kHalf ? with_head<c10::Half>(q.size(2), call) : with_head<c10::BFloat16>(q.size(2), call);
}

}  // namespace matmuls::packed
#endif
