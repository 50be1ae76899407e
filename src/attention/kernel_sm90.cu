// Attention with its probabilities in one kernel on Hopper: scores, softmax and context, without reading back a
// score-sized tensor. The probabilities are written once: 201 MB a layer of BERT base at 32 x 512, 62 us of an H200.
//
// Two passes over the keys:
//    pass 1:  S = q @ k^T  ->  each row's maximum and sum
//    pass 2:  S = q @ k^T  ->  P = softmax(S)  ->  stored to memory, and from registers: context += P @ v
//
// Computing S twice costs less than passing scores through memory: a float32 row of scores does not fit on chip.
//
// In a block two warpgroups process 64 queries each; one of their threads loads tiles of keys and values ahead (a warp
// of its own would take registers from the others). Probabilities are stored through the shared memory of the warp's
// queries, so that whole lines are written.
#ifdef __CUDACC__
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "attention/attention.h"
#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.h"

namespace matmuls {
namespace {

constexpr int kHead = 64;                            // head size D: a row of 128 bytes, the swizzle width
constexpr int kGroup = 128, kGroups = 2;             // threads of a warpgroup; warpgroups that multiply
constexpr int kQueries = 64 * kGroups, kKeys = 128;  // queries of a block; keys of a stage
constexpr int kHalf = 64;                            // keys of a box of probabilities
constexpr int kStages = 4;
constexpr int kWords = 512;  // words of 32 keys each for a mask shared by all queries
constexpr int kRowBytes = 128, kStageBytes = kKeys * kRowBytes, kBoxBytes = 64 * kRowBytes;
constexpr int kShared = kStages * kStageBytes + kGroups * kBoxBytes + 8 * (2 * kStages + 1) + 8 + 4 * kWords;
constexpr int kThreads = kGroups * kGroup;
constexpr float kLog2e = 1.4426950408889634f;

struct Shape {
  int queries, keys, heads, tiles;  // tiles of queries per head
  bool causal;
  float scale;  // includes the factor log2(e)
  const unsigned char* mask;
  int64_t mask_strides[4];  // batch, head, query, key
  void* context;
  int64_t context_strides[3];  // batch, query, head
  void* probabilities;
  float* sums;  // logarithm of each row's sum of exponentials, or null
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline void load(const CUtensorMap& map, void* to, uint64_t* barrier, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(ptx::shared_address(to)),
      "l"(&map), "r"(ptx::shared_address(barrier)), "r"(0), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

constexpr float kNothing = -std::numeric_limits<float>::infinity();
__device__ inline float or_zero(float max) { return max == kNothing ? 0.0f : max; }

// Masked elements of a thread's two rows in 64 columns from `column` on. Bit 8 (j % 4) + e of word j / 4 is column + 8
// j + 2 (lane % 4) + e.
struct Hidden {
  uint32_t at[2][2];  // [row][word]
  __device__ bool some() const { return (at[0][0] | at[0][1] | at[1][0] | at[1][1]) != 0; }
  __device__ bool holds(int i) const {  // the i-th of a thread's 32 elements
    return at[i / 2 % 2][i / 16] >> (i / 4 % 4 * 8 + i % 2) & 1;
  }
};

// A thread's view of the mask.
struct Masks {
  const uint32_t* words;         // one bit per key that is masked for all queries; or null, then `rows`
  const unsigned char* rows[2];  // mask rows of the thread's two query rows, or null
  int64_t step;
  int end;      // keys from here on are masked for all queries
  int last[2];  // last visible key of each row under the causal mask

  // `first`: the warp's first row.
  __device__ Hidden hidden(int column, int first, int lane) const {
    Hidden h{};
    const int mine = 2 * (lane % 4);
    if (words) {
#pragma unroll
      for (int w = 0; w < 2; ++w) h.at[0][w] = h.at[1][w] = words[column / 32 + w] >> mine & 0x03030303u;
    }
    const bool bytes = !words && rows[0];
    if (!bytes && (words || column + 64 <= end) && (last[0] == INT32_MAX || column + 63 <= first)) return h;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int c = column + mine + 8 * (i / 2) + i % 2;
        bool gone = c >= end || c > last[r];
        if (bytes && !gone) gone = rows[r][c * step] != 0;
        h.at[r][i / 8] |= static_cast<uint32_t>(gone) << (i / 2 % 4 * 8 + i % 2);
      }
    }
    return h;
  }

  // True if row r sees any key. Reads the mask again, only for rows whose sum is 0. Four lanes share a row.
  __device__ bool sees(int r, int lane) const {
    bool some = false;
    const int keys = last[r] < end ? last[r] + 1 : end;
#pragma unroll 4
    for (int c = lane % 4; c < keys; c += 4)
      some |= words ? !(words[c / 32] >> c % 32 & 1) : !rows[r] || rows[r][c * step] == 0;
    return __any_sync(0xfu << (lane & ~3), some);
  }
};

// Masks 32 scores of a tile from `begin` on.
template <int begin, int N>
__device__ inline void hide(float (&scores)[N], const Hidden& h) {
#pragma unroll
  for (int i = 0; i < 32; ++i)
    if (h.holds(i)) scores[begin + i] = kNothing;
}

template <class T, bool masked>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                     const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Shape shape) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const boxes = shared + kStages * kStageBytes;  // per warpgroup: its queries, later its probabilities
  uint64_t* const full = reinterpret_cast<uint64_t*>(boxes + kGroups * kBoxBytes);
  uint64_t* const empty = full + kStages;
  uint64_t* const queries_here = empty + kStages;
  int* const shared_end = reinterpret_cast<int*>(queries_here + 1);
  uint32_t* const words = reinterpret_cast<uint32_t*>(shared_end + 2);

  const int group = threadIdx.x / kGroup, lane = threadIdx.x % 32;
  const int tile = blockIdx.x % shape.tiles, matrix = blockIdx.x / shape.tiles;
  const int head = matrix % shape.heads, batch = matrix / shape.heads;
  const int row0 = tile * kQueries;
  const int tiles = (shape.keys + kKeys - 1) / kKeys;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], kGroups);
    }
    ptx::mbarrier_init(queries_here);
    ptx::fence_mbarrier_init();
    *shared_end = 0;
  }
  __syncthreads();
  const unsigned char* const mask = shape.mask + batch * shape.mask_strides[0] + head * shape.mask_strides[1];
  // A mask row shared by all queries becomes bits; keys after its last visible key are skipped.
  const bool shares = masked && shape.mask && shape.mask_strides[2] == 0 && tiles * kKeys <= 32 * kWords;
  if (shares) {
    for (int c = threadIdx.x; c < tiles * kKeys; c += kThreads) {
      const uint32_t word = __ballot_sync(~0u, c >= shape.keys || mask[c * shape.mask_strides[3]] != 0);
      if (lane == 0) {
        words[c / 32] = word;
        if (~word) atomicMax(shared_end, c + 32 - __clz(~word));
      }
    }
    __syncthreads();
  }
  const int end = shares ? *shared_end : shape.keys;
  // Tiles of keys that the block sees; if causal, those that its last row sees.
  const int seen = (min(end, masked && shape.causal ? row0 + kQueries : end) + kKeys - 1) / kKeys;

  // Steps: the key tiles of pass 1, then alternating key and value tiles of pass 2.
  const int steps = 3 * seen;
  int fetched = 0;
  const auto fetch = [&] {  // called by one thread
    const int stage = fetched % kStages, rest = fetched - seen;
    if (fetched >= kStages) ptx::mbarrier_wait(&empty[stage], fetched / kStages % 2 ^ 1);
    ptx::mbarrier_arrive_expect_tx(&full[stage], kStageBytes);
    const bool values = rest > 0 && rest % 2;
    load(values ? v_map : k_map, shared + stage * kStageBytes, &full[stage], (rest < 0 ? fetched : rest / 2) * kKeys,
         head, batch);
    ++fetched;
  };
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(queries_here, kGroups * kBoxBytes);
    for (int g = 0; g < kGroups; ++g) load(q_map, boxes + g * kBoxBytes, queries_here, row0 + 64 * g, head, batch);
    while (fetched < min(kStages, steps)) fetch();
  }
  __syncwarp();

  const int warp = threadIdx.x % kGroup / 32;
  const int warp_row = row0 + 64 * group + 16 * warp;
  const int rows[2] = {warp_row + lane / 4, warp_row + lane / 4 + 8};
  Masks masks{shares ? words : nullptr, {}, shape.mask_strides[3], end, {INT32_MAX, INT32_MAX}};
  if constexpr (masked) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (shape.causal) masks.last[r] = rows[r];
      if (shape.mask && !shares) masks.rows[r] = mask + min(rows[r], shape.queries - 1) * shape.mask_strides[2];
    }
  }
  unsigned char* const mine = boxes + group * kBoxBytes + warp * 16 * kRowBytes;
  // Address of this lane's row of an 8 x 8 matrix, 16 columns from 16 k on.
  const auto at = [&](int k) { return mine + lane % 16 * kRowBytes + ((2 * k + lane / 16) ^ lane % 8) * 16; };
  uint32_t q[4][4];
  ptx::mbarrier_wait(queries_here, 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) ptx::ldmatrix_x4(ptx::shared_address(at(k)), q[k]);

  unsigned n = 0;
  const auto arrived = [&] {
    const int stage = n % kStages;
    ptx::mbarrier_wait(&full[stage], n / kStages % 2);
    ++n;
    return stage;
  };
  const auto release = [&](int stage) {
    if (threadIdx.x % kGroup == 0) ptx::mbarrier_arrive(&empty[stage]);
  };
  // While a product runs: refill the released stages.
  const auto refill = [&](int released) {
    if (threadIdx.x == 0)
      while (fetched < min(released + kStages, steps)) fetch();
    __syncwarp();
  };
  const float scale = shape.scale;

  // ---- first pass: maximum and sum of each row, over the columns that a thread holds
  float top[2] = {kNothing, kNothing}, sum[2] = {};
  float scores[64] = {};
  for (int i = 0; i < seen; ++i) {
    const int stage = arrived();
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      hopper::wgmma_rs<T, false>(scores, q[k], hopper::smem_descriptor(shared + stage * kStageBytes + k * 32), k > 0);
    hopper::wgmma_commit_group();
    refill(i);
    hopper::wgmma_wait_group<0>();
    hopper::warpgroup_fence_operand(scores);
    release(stage);
    if (masked || (i + 1) * kKeys > end) {
      const Hidden left = masks.hidden(i * kKeys, warp_row, lane);
      if (left.some()) hide<0>(scores, left);
      const Hidden right = masks.hidden(i * kKeys + kHalf, warp_row, lane);
      if (right.some()) hide<32>(scores, right);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tops[2] = {top[r], kNothing};
#pragma unroll
      for (int j = 0; j < 32; ++j) tops[j % 2] = fmaxf(tops[j % 2], scores[j / 2 * 4 + 2 * r + j % 2]);
      const float now = fmaxf(tops[0], tops[1]), base = or_zero(now);
      float sums[2] = {sum[r] * ptx::exp2_approx((top[r] - base) * scale), 0};
#pragma unroll
      for (int j = 0; j < 32; ++j) sums[j % 2] += ptx::exp2_approx((scores[j / 2 * 4 + 2 * r + j % 2] - base) * scale);
      top[r] = now, sum[r] = sums[0] + sums[1];
    }
  }
  float shift[2];  // log2 of a row's sum
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float all = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
    all = or_zero(fmaxf(all, __shfl_xor_sync(~0u, all, 2)));
    float total = sum[r] * ptx::exp2_approx((top[r] - all) * scale);
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    top[r] = all;
    // A row with all keys masked is 0; a row whose visible scores are all -inf is NaN, as in torch.
    const bool nothing = masked && total == 0 && !masks.sees(r, lane);  // the row's four lanes have the same total
    shift[r] = nothing ? std::numeric_limits<float>::infinity() : __log2f(total);
    if (shape.sums && lane % 4 == 0 && rows[r] < shape.queries)
      shape.sums[static_cast<int64_t>(matrix) * shape.queries + rows[r]] = fmaf(top[r], scale, shift[r]) / kLog2e;
  }

  // ---- second pass
  float out[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) out[i] = 0;
  T* const rows_out =
      static_cast<T*>(shape.probabilities) + (static_cast<int64_t>(matrix) * shape.queries + warp_row) * shape.keys;
  const int rows_left = shape.queries - warp_row;
  // Stores a warp's box in whole lines of 128 bytes.
  const auto leave = [&](int column) {
    __syncwarp();
    const int c = column + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8;
      const uint4 w = *reinterpret_cast<const uint4*>(mine + row * kRowBytes + (lane % 8 ^ row % 8) * 16);
      if (row < rows_left && c < shape.keys) ptx::store_once(rows_out + int64_t{row} * shape.keys + c, w);
    }
    __syncwarp();
  };
  float s[32] = {};
  for (int i = 0; i < seen; ++i) {
    const int keys = arrived();
    int values = -1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = i * kKeys + half * kHalf;
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        hopper::wgmma_rs<T, false>(
            s, q[k], hopper::smem_descriptor(shared + keys * kStageBytes + half * kBoxBytes + k * 32), k > 0);
      hopper::wgmma_commit_group();
      refill(seen + 2 * i);
      hopper::wgmma_wait_group<0>();
      hopper::warpgroup_fence_operand(s);
      if (half == 1) release(keys);
      Hidden h{};
      if (masked || column + kHalf > end) h = masks.hidden(column, warp_row, lane);
      uint32_t p[4][4];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float e[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          e[c] = ptx::exp2_approx(fmaf(s[4 * j + c] - top[c / 2], scale, -shift[c / 2]));
        }
        p[j / 2][j % 2 * 2] = hopper::pack2<T>(e[0], e[1]);
        p[j / 2][j % 2 * 2 + 1] = hopper::pack2<T>(e[2], e[3]);
      }
      if (h.some()) {  // 0 even if the row is NaN
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
          uint32_t& pair = p[i / 8][i / 2 % 4];
          if (h.holds(i)) pair &= 0xffff0000u;
          if (h.holds(i + 1)) pair &= 0xffffu;
        }
      }
      if (half == 0) values = arrived();
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        hopper::wgmma_rs<T, true>(
            out, p[k], hopper::smem_descriptor(shared + values * kStageBytes + half * kBoxBytes + k * 16 * kRowBytes),
            true);
      hopper::wgmma_commit_group();
#pragma unroll
      for (int k = 0; k < 4; ++k) hopper::stmatrix_x4(at(k), p[k][0], p[k][1], p[k][2], p[k][3]);
      hopper::wgmma_wait_group<0>();
      hopper::warpgroup_fence_operand(out);
      leave(column);
    }
    release(values);
  }
  T* const context =
      static_cast<T*>(shape.context) + batch * shape.context_strides[0] + head * shape.context_strides[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (rows[r] >= shape.queries) continue;
    T* const to = context + rows[r] * shape.context_strides[1] + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<uint32_t*>(to + 8 * j) = hopper::pack2<T>(out[4 * j + 2 * r], out[4 * j + 2 * r + 1]);
  }
  if (seen < tiles) {  // columns that no row of the block sees
#pragma unroll
    for (int k = 0; k < 4; ++k) hopper::stmatrix_x4(at(k), 0, 0, 0, 0);
    for (int i = seen; i < tiles; ++i)
      for (int half = 0; half < 2; ++half) leave(i * kKeys + half * kHalf);
  }
}
#else
template <class T, bool masked>
__global__ void attention_kernel(const __grid_constant__ CUtensorMap, const __grid_constant__ CUtensorMap,
                                 const __grid_constant__ CUtensorMap, const __grid_constant__ Shape) {}
#endif

// ----------------------------------------------------------------------------------------------------------- launch

// Tensor map of heads [B, H, S, D] of any strides, in boxes of `rows` of S.
template <class T>
CUtensorMap map_of(const at::Tensor& t, int rows) {
  const auto size = [&](int d) { return static_cast<cuuint64_t>(t.size(d)); };
  const auto step = [&](int d) {  // the stride of a dimension of size 1 is arbitrary
    return static_cast<cuuint64_t>(t.size(d) == 1 ? kRowBytes : t.stride(d) * t.element_size());
  };
  const cuuint64_t sizes[4] = {size(3), size(2), size(1), size(0)}, strides[3] = {step(2), step(1), step(0)};
  const cuuint32_t box[4] = {kHead, static_cast<cuuint32_t>(rows), 1, 1};
  return tensor_map<T>("attention_forward", t.const_data_ptr(), sizes, strides, box);
}

template <class T, bool masked>
void launch(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Shape& shape) {
  constexpr auto kernel = attention_kernel<T, masked>;
  static PerDevice<bool> known{};
  auto& ready = known[c10::cuda::current_device()];
  if (!ready.load(std::memory_order_relaxed)) {
    C10_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    ready.store(true, std::memory_order_relaxed);
  }
  allow_shared_memory<kernel>();
  const int64_t blocks = q.size(0) * q.size(1) * shape.tiles;
  Launch launch(static_cast<unsigned>(blocks), kThreads, kShared);
  launch(kernel, map_of<T>(q, 64), map_of<T>(k, kKeys), map_of<T>(v, kKeys), shape);
}

// True if TMA can address the heads.
bool walkable(const at::Tensor& t) {
  if (t.size(3) != kHead || t.stride(3) != 1 || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  for (int d = 0; d < 3; ++d)
    if (t.size(d) > 1 && (t.stride(d) <= 0 || t.stride(d) % 8 != 0)) return false;
  return true;
}

bool is_bytes(const at::Tensor& mask) { return mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte; }

}  // namespace

bool fits_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale) {
  if (!has_hopper_kernels(q.device().index())) return false;
  const int64_t queries = q.size(2), keys = k.size(2), tiles = (queries + kQueries - 1) / kQueries;
  return (q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf) && q.numel() > 0 && keys > 0 &&
         walkable(q) && walkable(k) && walkable(v) && (!mask.defined() || is_bytes(mask)) && scale > 0 &&
         keys % 8 == 0 && queries <= INT32_MAX / 2 && keys <= INT32_MAX / 2 &&
         q.size(0) * q.size(1) * tiles <= INT32_MAX;
}

void attend_sm90(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask, double scale,
                 bool causal, const at::Tensor& context, const at::Tensor& probabilities, const at::Tensor& sums) {
  const int64_t queries = q.size(2), keys = k.size(2);
  Shape shape{static_cast<int>(queries),
              static_cast<int>(keys),
              static_cast<int>(q.size(1)),
              static_cast<int>((queries + kQueries - 1) / kQueries),
              causal,
              static_cast<float>(scale) * kLog2e,
              mask.defined() ? static_cast<const unsigned char*>(mask.const_data_ptr()) : nullptr,
              {},
              context.mutable_data_ptr(),
              {context.stride(0), context.stride(1), context.stride(2)},
              probabilities.mutable_data_ptr(),
              sums.defined() ? sums.mutable_data_ptr<float>() : nullptr};
  if (mask.defined()) {
    const at::Tensor whole = mask.expand({q.size(0), q.size(1), queries, keys});
    for (int d = 0; d < 4; ++d) shape.mask_strides[d] = whole.stride(d);
  }
  const bool masked = mask.defined() || causal;
  if (q.scalar_type() == at::kBFloat16)
    masked ? launch<c10::BFloat16, true>(q, k, v, shape) : launch<c10::BFloat16, false>(q, k, v, shape);
  else
    masked ? launch<c10::Half, true>(q, k, v, shape) : launch<c10::Half, false>(q, k, v, shape);
}

}  // namespace matmuls
#endif
