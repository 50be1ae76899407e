// The float32 product with densified A as three fp16 products (densified.h) on Hopper, with A dense or in 2:4 form.
//
//   block:    128 rows x `columns` columns of the result; if these are too few, a share of K
//   cluster:  the shares of K of one tile; they add up their sums through distributed shared memory, in fixed order
//   warps:    one loads stages by TMA ahead, two warpgroups run wgmma on 64 rows each
//   stage:    | A high | A low | B high | B low |   64 of K; in 2:4 form A is one StepOfTile
//
// Tensor cores round their sums towards zero. Hence they add up only 64 products at a time, and float32 registers add
// the rest. Columns of the result that do not fit are recomputed in float32 from A's nonzeros (fallback.cuh).
#ifdef __CUDACC__

#include "gpu/hopper.cuh"
#include "gpu/tensor_map.h"
#include "sparse/spmm/densified/fallback.cuh"
#include "sparse/spmm/densified/fp16x2_sm90.cuh"

namespace matmuls {
namespace {

constexpr int kRowBytes = 128, kWide = 64;  // a row of a tile: 64 numbers
constexpr int kGroup = 128, kGroups = 2, kRows = kTileRows;
constexpr int kThreads = kGroup * (kGroups + 1);
constexpr int kMostShares = 8;   // of K: blocks of a cluster
constexpr int kStepsOfTile = 4;  // steps of K that take as long as a tile's prologue and epilogue

template <int columns_, bool is_sparse24_>
struct Tile {
  static constexpr int columns = columns_;
  static constexpr bool sparse24 = is_sparse24_;
  static constexpr int half_bytes = kRows * kRowBytes, b_bytes = std::max(columns, kWide) * kRowBytes;  // of one half
  static constexpr int a_bytes = sparse24 ? sizeof(StepOfTile) : 2 * half_bytes;
  static constexpr int stage_bytes = a_bytes + 2 * b_bytes;
  static constexpr int stages = sparse24 ? (columns == 128 ? 4 : 6) : (columns == 128 ? 3 : 4);
  // Leaves room for a block of split_kernel on the same multiprocessor: A's first tiles load while B is being split.
  static constexpr int shared = stages * stage_bytes + 2 * stages * 8 + 8;
  static constexpr int out_stride = columns + 8;  // floats; rows that a warp writes together lie in different banks
  static_assert(kRows * out_stride * 4 <= stages * stage_bytes && shared <= 227 << 10);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Loads four numbers from another block's shared memory, after a cluster barrier, if `there`; predicated, without a
// branch.
__device__ inline void load_from(uint32_t remote, bool there, float (&x)[4]) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t@p ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
      : "r"(remote), "r"(static_cast<int>(there)));
}
#endif

struct Shape {
  // inner: K; across: tiles of columns; steps of K; how many of them stay in the L2
  int rows, n, inner, across, steps, staying;
};

// A in 2:4 form: its steps, and `rest`, whose product already lies in out.
struct TwoOfFour {
  const StepOfTile* steps;
  const int2* rest;
};

template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    fp16x2_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                  const TwoOfFour pairs, const Shape shape, const int* exponents, const int* powers, float* out,
                  int64_t out_stride, float alpha, const __grid_constant__ OriginalOperands given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char tiles[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(tiles + Tile::stages * Tile::stage_bytes);
  uint64_t* const empty = full + Tile::stages;
  bool& fits = *reinterpret_cast<bool*>(empty + Tile::stages);
  float* const sums_of_block = reinterpret_cast<float*>(tiles);
  const unsigned rank = ptx::cluster_rank(), shares = ptx::cluster_blocks();
  const int tile = blockIdx.x / shares, row0 = tile / shape.across * kRows,
            column0 = tile % shape.across * Tile::columns;
  const int first = static_cast<int>(rank * shape.steps / shares),
            last = static_cast<int>((rank + 1) * shape.steps / shares);
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const int first_row = static_cast<int>(rank * kRows / shares),  // the rows that this block adds up at the end
      last_row = min(static_cast<int>((rank + 1) * kRows / shares), shape.rows - row0);
  if (threadIdx.x == 0) {
    if (!Tile::sparse24) hopper::prefetch_tensormap(a_map);
    hopper::prefetch_tensormap(b_map);
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], Tile::sparse24 ? kGroups * kGroup : kGroups * kGroup / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (group == kGroups) {
    hopper::setmaxnreg_dec<40>();
    if (thread == 0) {
      const ptx::L2Policy staying = ptx::l2_policy(true), passing = ptx::l2_policy(false);
      const auto load_a = [&](int k, int stage) {
        const ptx::L2Policy policy = k < shape.staying ? staying : passing;
        unsigned char* const to = tiles + stage * Tile::stage_bytes;
        ptx::mbarrier_arrive_expect_tx(&full[stage], Tile::stage_bytes);
        if constexpr (Tile::sparse24)
          hopper::bulk_load(pairs.steps + int64_t{row0 / kRows} * shape.steps + k, to, &full[stage], sizeof(StepOfTile),
                            policy);
        else
#pragma unroll
          for (int half = 0; half < 2; ++half)
            hopper::tma_load_2d(a_map, to + half * Tile::half_bytes, &full[stage], k * kWide, row0 + half * shape.rows,
                                policy);
      };
      // A's first tiles load while split_kernel still runs. It calls griddepcontrol.launch_dependents only after its
      // own griddepcontrol.wait, when everything before it, A included, has been written.
      const int ahead = min(last - first, Tile::stages);
      for (int n = 0; n < ahead; ++n) load_a(first + n, n);
      ptx::griddepcontrol_wait();  // no launch_dependents for the next product's split_kernel: it cost 1 to 2 us
      for (int k = first, n = 0; k < last; ++k, ++n) {
        const int stage = n % Tile::stages;
        if (n >= ahead) {
          ptx::mbarrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
          load_a(k, stage);
        }
        unsigned char* const to = tiles + stage * Tile::stage_bytes + Tile::a_bytes;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int c = 0; c < Tile::columns; c += kWide)
            hopper::tma_load_2d(b_map, to + half * Tile::b_bytes + c * kRowBytes, &full[stage], column0 + c,
                                k * kWide + half * shape.inner);
      }
    } else if (thread / 32 == 1) {
      ptx::griddepcontrol_wait();
      const bool fit = given.fit_in(column0, min(column0 + Tile::columns, shape.n));
      if (thread % 32 == 0) fits = fit;
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    hopper::setmaxnreg_inc<232>();
    float sums[Tile::columns / 2] = {}, low[Tile::columns / 2] = {}, high[Tile::columns / 2] = {};
    for (int k = first, n = 0; k < last; ++k, ++n) {
      const int stage = n % Tile::stages;
      const unsigned char* const a = tiles + stage * Tile::stage_bytes + group * 64 * kRowBytes;
      const unsigned char* const b = tiles + stage * Tile::stage_bytes + Tile::a_bytes;
      ptx::mbarrier_wait(&full[stage], n / Tile::stages % 2);
      uint32_t places = 0;
      if constexpr (Tile::sparse24)
        places = reinterpret_cast<const uint32_t*>(
            reinterpret_cast<const StepOfTile*>(tiles + stage * Tile::stage_bytes)->places)[threadIdx.x];
      const auto multiply = [&](auto& acc, int half_a, int half_b, bool accumulate) {
        const auto b_from = [&](int k) {
          return hopper::smem_descriptor(b + half_b * Tile::b_bytes + k * kRowBytes, kWide * kRowBytes);
        };
        if constexpr (Tile::sparse24) {
          const unsigned char* const own = a + half_a * kRowBytes / 2;
          hopper::wgmma_sparse<c10::Half, 0>(acc, hopper::smem_descriptor(own), b_from(0), places, accumulate);
          hopper::wgmma_sparse<c10::Half, 1>(acc, hopper::smem_descriptor(own + 32), b_from(32), places, true);
        } else {
#pragma unroll
          for (int part = 0; part < 4; ++part)  // 16 of K each
            hopper::wgmma_ss<c10::Half, true>(acc, hopper::smem_descriptor(a + half_a * Tile::half_bytes + part * 32),
                                              b_from(16 * part), accumulate || part > 0);
        }
      };
      hopper::warpgroup_fence_operand(low);
      hopper::warpgroup_fence_operand(high);
      hopper::wgmma_fence();
      multiply(low, 1, 0, false);
      multiply(low, 0, 1, true);
      hopper::wgmma_commit_group();
      multiply(high, 0, 0, false);
      hopper::wgmma_commit_group();
      hopper::wgmma_wait_group<1>();
      hopper::warpgroup_fence_operand(low);
#pragma unroll
      for (int i = 0; i < Tile::columns / 2; ++i) sums[i] = fmaf(low[i], 1 / kLowScale, sums[i]);
      hopper::wgmma_wait_group<0>();
      hopper::warpgroup_fence_operand(high);
      // 2:4: each thread arrives, for the metadata that it read. Otherwise one lane per warp: arrivals of all took 15 %
      // more.
      if (Tile::sparse24 || thread % 32 == 0) ptx::mbarrier_arrive(&empty[stage]);
#pragma unroll
      for (int i = 0; i < Tile::columns / 2; ++i) sums[i] += high[i];
    }
    hopper::named_barrier_sync(1, kGroups * kGroup);  // both warpgroups have read the last tile
    const int lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < Tile::columns / 8; ++j) {
      float* const to = sums_of_block + row * Tile::out_stride + 8 * j + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = {sums[4 * j], sums[4 * j + 1]};
      *reinterpret_cast<float2*>(to + 8 * Tile::out_stride) = {sums[4 * j + 2], sums[4 * j + 3]};
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::griddepcontrol_wait();  // B's exponents are written
    // A thread adds up four columns of four rows at once.
    constexpr int across = Tile::columns / 4, apart = kGroups * kGroup / across, at_once = 4;
    const int c = threadIdx.x % across * 4;
    const int end = fits && column0 + c < shape.n ? last_row : 0;
    if (!fits)
      given.sum_rows<kGroups * kGroup, Tile::columns, Tile::stages * Tile::stage_bytes>(
          reinterpret_cast<float4*>(tiles), row0 + first_row, row0 + last_row, column0, shape.n, shape.inner, out,
          out_stride, alpha);
    int column_exponents[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) column_exponents[i] = powers[min(column0 + c, shape.n - 4) + i];
    for (int own = first_row + threadIdx.x / across; own < end; own += at_once * apart) {
      float total[at_once][4] = {};
      int e[at_once];
      [[maybe_unused]] float4 with_rest[at_once] = {};  // the product with rest
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        const int r = row0 + min(own + j * apart, end - 1);
        e[j] = exponents[r];
        if constexpr (Tile::sparse24)
          if (const int2 own_rest = pairs.rest[r]; own_rest.x < own_rest.y)
            with_rest[j] = *reinterpret_cast<const float4*>(out + r * out_stride + column0 + c);
      }
#pragma unroll 4
      for (unsigned block = 0; block < shares; ++block) {
        const uint32_t from = ptx::mapa(sums_of_block + c, block);
        float part[at_once][4] = {};
#pragma unroll
        for (int j = 0; j < at_once; ++j)
          load_from(from + (own + j * apart) * Tile::out_stride * sizeof(float), own + j * apart < end, part[j]);
#pragma unroll
        for (int j = 0; j < at_once; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][i] += part[j][i];
      }
#pragma unroll
      for (int j = 0; j < at_once; ++j) {
        if (own + j * apart >= end) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) total[j][i] = times_power_of_two(total[j][i], -e[j] - column_exponents[i]);
        if constexpr (Tile::sparse24)
          total[j][0] += with_rest[j].x, total[j][1] += with_rest[j].y, total[j][2] += with_rest[j].z,
              total[j][3] += with_rest[j].w;
        *reinterpret_cast<float4*>(out + int64_t{row0 + own + j * apart} * out_stride + column0 + c) = {
            alpha * total[j][0], alpha * total[j][1], alpha * total[j][2], alpha * total[j][3]};
      }
    }
  }
  __syncwarp();
  ptx::cluster_arrive();  // other blocks may still read this block's sums
  ptx::cluster_wait();
#endif
}

// Tensor map over both halves of a matrix, in boxes of 64 columns.
CUtensorMap map_of(const void* halves, int64_t rows, int64_t columns, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(2 * rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kWide, static_cast<cuuint32_t>(box_rows)};
  return tensor_map<c10::Half>("spmm", halves, sizes, strides, box);
}

// How many steps of A should stay in the L2 from one product to the next. If the L2 takes everything that passes,
// nothing of A is left when it is read again. More than a third of the L2 for A and the `others` was slower (H200, 4096
// x 4096).
int staying_steps(size_t bytes, int64_t others, int steps) {
  const double room = static_cast<double>(device_limits().l2) / 3. - static_cast<double>(others);
  return static_cast<int>(std::clamp(room / static_cast<double>(bytes), 0., 1.) * steps);
}

struct Shares {
  int64_t cost;
  int of_k;
};

// The number of shares of K with the least work for the busiest multiprocessor, counted in steps plus a tile's
// overhead. A step of 64 columns takes .64 of one of 128.
template <class Tile>
Shares shares_of(int64_t rows, int64_t n, int64_t inner) {
  const int64_t tiles = int64_t{up(rows, kRows)} * up(n, Tile::columns);
  Shares best{INT64_MAX, 1};
  for (int shares = 1; shares <= kMostShares; ++shares) {
    const int at_once = clusters_at_once<fp16x2_kernel<Tile>, kThreads, Tile::shared>(shares);
    if (at_once == 0) continue;
    const int64_t steps = up(tiles, at_once) * (kStepsOfTile + up(up(inner, kWide), shares));
    const int64_t cost = steps * (Tile::columns == 128 ? 100 : 64);
    if (cost < best.cost) best = {cost, shares};
  }
  return best;
}

template <class Tile>
void launch(const DensifiedMatrix& a, const SplitDense& b, int64_t inner, const at::Tensor& out, double alpha,
            const OriginalOperands& given, int shares) {
  const int64_t rows = out.size(0), n = out.size(1);
  const int steps = up(inner, kWide);
  const Shape shape{static_cast<int>(rows),
                    static_cast<int>(n),
                    static_cast<int>(inner),
                    up(n, Tile::columns),
                    steps,
                    staying_steps(a.parts.nbytes(), (2 * inner + rows) * n * 4, steps)};
  const int64_t blocks = int64_t{up(rows, kRows)} * shape.across * shares;
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, "spmm: expected a smaller result, got one of ", rows, " x ", n);
  Launch launch(static_cast<unsigned>(blocks), kThreads, Tile::shared);
  launch.in_clusters(shares);
  launch.programmatic();
  CUtensorMap a_map{};
  TwoOfFour pairs{};
  if constexpr (Tile::sparse24)
    pairs = {static_cast<const StepOfTile*>(a.parts.const_data_ptr()),
             static_cast<const int2*>(a.rest.const_data_ptr())};
  else
    a_map = map_of(a.parts.const_data_ptr(), rows, a.parts.size(2), kRows);
  launch(fp16x2_kernel<Tile>, a_map, map_of(b.halves, inner, n, kWide), pairs, shape, a.exponents.const_data_ptr<int>(),
         static_cast<const int*>(b.powers), out.mutable_data_ptr<float>(), out.stride(0), static_cast<float>(alpha),
         given);
}

template <bool sparse24>
void multiply(const DensifiedMatrix& a, const SplitDense& b, int64_t inner, const at::Tensor& out, double alpha,
              const OriginalOperands& given) {
  const auto by = [&]<class Tile>(Tile, const Shares& shares) {
    launch<Tile>(a, b, inner, out, alpha, given, shares.of_k);
  };
  const int64_t rows = out.size(0), n = out.size(1);
  using Narrow = Tile<32, sparse24>;
  using Middle = Tile<64, sparse24>;
  using Wide = Tile<128, sparse24>;
  if (n <= 32) return by(Narrow(), shares_of<Narrow>(rows, n, inner));
  const Shares middle = shares_of<Middle>(rows, n, inner);
  if (n <= 64) return by(Middle(), middle);
  const Shares wide = shares_of<Wide>(rows, n, inner);
  wide.cost <= middle.cost ? by(Wide(), wide) : by(Middle(), middle);
}

}  // namespace

bool can_multiply_fp16x2(const at::Tensor& operand) {
  return has_hopper_kernels(operand.get_device()) && can_split_dense();
}

void multiply_fp16x2(const DensifiedMatrix& a, const Pattern& p, const at::Tensor& values, const at::Tensor& dense,
                     const at::Tensor& out, double alpha) {
  const int64_t inner = dense.size(0), n = dense.size(1);
  TORCH_CHECK_VALUE(out.size(0) <= INT32_MAX / 2 && inner <= INT32_MAX / 2 && n <= INT32_MAX / 2,
                    "spmm: expected smaller operands, got ", out.sizes(), " and ", dense.sizes());
  const int64_t most = std::max<int64_t>(kHalvesBytes / (4 * inner) / 128 * 128, 128);
  if (n > most) {  // slices share the memory for B's halves
    for (int64_t first = 0; first < n; first += most) {
      const int64_t columns = std::min(most, n - first);
      multiply_fp16x2(a, p, values, dense.narrow(1, first, columns), out.narrow(1, first, columns), alpha);
    }
    return;
  }
  const at::Tensor memory = empty({SplitDense::nbytes(inner, n)}, dense.options().dtype(at::kByte));
  const SplitDense halves(memory.mutable_data_ptr(), inner, n);
  split_dense(dense, halves, a.rest, out);
  const OriginalOperands given{p.crow.const_data_ptr(),
                               p.col.const_data_ptr(),
                               p.order.defined() ? p.order.const_data_ptr() : nullptr,
                               values.const_data_ptr<float>(),
                               dense.const_data_ptr<float>(),
                               dense.stride(0),
                               p.crow.scalar_type() == at::kLong,
                               static_cast<const FitFlags*>(a.facts.const_data_ptr()),
                               halves.facts};
  (a.rest.size(0) > 0 ? multiply<true> : multiply<false>)(a, halves, inner, out, alpha, given);
}

}  // namespace matmuls
#endif
