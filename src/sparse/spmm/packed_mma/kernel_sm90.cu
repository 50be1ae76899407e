// Products with a packed matrix (kernel_sm90.h, layout.h) on Hopper: out = A @ B, or x A^T + bias.
//
//   producer warpgroup: one thread loads stages by TMA; a stage is the next 64 of K for each part
//   4 consumer warpgroups: unpack A's fragments from shared memory, wgmma with A in registers
//      parts = 1: 64 rows of the result each      parts = 2, 4: `parts` warpgroups share the rows and divide K
//   the blocks of a cluster (`shares`) also divide K
//
// A block adds its parts in shared memory and sends each row to the block that owns it, which adds what it receives,
// always in the same order.
//
// B lies in shared memory in rows of 128 bytes, and TMA's time depends on the number of these rows. Hence a narrow B
// puts `aside` rows of 64 / aside columns into one of them. For 64 rows of K and aside = 2:
//
//   at 128 * j of group 0:   B row 8 j + 0 | B row 8 j + 1
//   at 128 * j of group 1:   B row 8 j + 2 | B row 8 j + 3     begin_of(i): where row i of j = 0 lies
//   ...
//
// For a linear layer a row of 128 bytes holds 64 of K of one row of x.
#ifdef __CUDACC__
#include "sparse/spmm/packed_mma/kernel_sm90.h"

#include "glue/handles.h"
#include "gpu/hopper.cuh"
#include "gpu/hopper_limits.h"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.h"
#include "sparse/csr.cuh"

namespace matmuls {
namespace {

constexpr int kRowBytes = 128, kWide = 64;  // a row of B's tile: 64 numbers
constexpr int kEight = 8 * kRowBytes;
constexpr int kGroup = 128, kGroups = 4, kMultiply = kGroup * kGroups, kThreads = kMultiply + kGroup;
constexpr int kMostBlocks = 8;            // of a cluster
constexpr int kMostBlocksAcross = 65535;  // of a grid, in y and z
constexpr int kMostStages = 16, kEarly = 2, kBarriers = 2 * kMostStages * 8 + 16;

// columns: of the result. aside: rows of B per 128 bytes, 0: linear layer. parts: warpgroups that divide K.
template <class T_, int columns_, int aside_, int parts_>
struct Tile {
  using T = T_;
  static constexpr bool linear = aside_ == 0;
  static constexpr int columns = columns_, aside = std::max(aside_, 1), parts = parts_;  // parts of K in a block
  static constexpr int row_groups = kGroups / parts, rows = row_groups * kPackedRows;
  static constexpr int depth = parts * kPackedColumns;  // of K in a stage
  static constexpr int boxes = linear ? parts : std::max(columns / kWide, 1);
  static constexpr int box_bytes = (linear ? columns : depth / aside) * kRowBytes, dense_bytes = boxes * box_bytes;
  static constexpr int begin_of(int i) {
    return linear ? 32 * i : i / aside * parts * kEight + i % aside * (kRowBytes / aside);
  }
  // Unpacks the next stage while wgmma works on this one: there are registers for both.
  static constexpr bool overlaps = columns <= 64;
  static constexpr int stride = columns + 8;  // floats; rows that a warp writes together lie in different banks
  // threads per row of the result, rows between those of a thread
  static constexpr int across = columns / 8, apart = kMultiply / across;
  static constexpr int sums_bytes = kGroups * kPackedRows * stride * 4;
};

template <class T>
struct Result {
  T* out;
  int64_t stride;  // between rows of the result
  const T* bias;   // [rows of A], or null
};

struct Shape {
  int rows, n, steps;  // steps: tiles in a row of A
  int each, more;      // stages of K per block of a cluster; how many blocks have one more
  int stages, stage_bytes, tile_bytes, own_rows;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ inline uint32_t load_shared(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}
// The lane's next pair if `bit` of its head is set, else 0.
__device__ inline uint32_t next_pair(uint32_t head, uint32_t bit, uint32_t& at) {
  uint32_t x;
  asm volatile(
      "{\n\t.reg .pred p;\n\t.reg .b32 has;\n\tand.b32 has, %2, %3;\n\tsetp.ne.b32 p, has, 0;\n\tmov.b32 %0, 0;\n\t"
      "@p ld.shared.b32 %0, [%1];\n\t@p add.u32 %1, %1, 4;\n\t}"
      : "=&r"(x), "+r"(at)
      : "r"(head), "r"(bit));
  return x;
}
__device__ inline void add(const float* from, float (&sum)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(from + i);
    sum[i] += x.x, sum[i + 1] += x.y, sum[i + 2] += x.z, sum[i + 3] += x.w;
  }
}
#endif

template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    packed_kernel(const __grid_constant__ CUtensorMap dense_map, const unsigned char* packed,
                  const Result<typename Tile::T> result, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = typename Tile::T;
  extern __shared__ __align__(1024) unsigned char tiles[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(tiles + shape.stages * shape.stage_bytes);
  uint64_t *const empty = full + kMostStages, *const received = empty + kMostStages;
  float* const others = reinterpret_cast<float*>(tiles + shape.stages * shape.stage_bytes + kBarriers);
  const int shares = static_cast<int>(gridDim.x), share = static_cast<int>(blockIdx.x);
  const int down = static_cast<int>(blockIdx.y), column0 = static_cast<int>(blockIdx.z) * Tile::columns;
  const int row0 = down * Tile::rows;
  const int first = share * shape.each + min(share, shape.more), many = shape.each + (share < shape.more ? 1 : 0);
  const int own_row = share * shape.own_rows, end_row = min(own_row + shape.own_rows, Tile::rows);
  // Uniform in a warp; the compiler infers that only from a shuffle.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / (kGroup / 32);
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  if (lane == 0) {  // a warp per barrier: to initialize one takes 40 cycles
    if (warp < shape.stages) {
      ptx::mbarrier_init(&full[warp]);
      ptx::mbarrier_init(&empty[warp], kMultiply);
      ptx::fence_mbarrier_init();
    } else if (warp == kMultiply / 32) {
      ptx::mbarrier_init(received);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(received, (shares - 1) * max(end_row - own_row, 0) * Tile::columns * 4);
    } else if (warp == kMultiply / 32 + 1) {
      hopper::prefetch_tensormap(dense_map);
    }
  }
  __syncthreads();
  if (shares > 1) ptx::cluster_arrive_relaxed();
  ptx::griddepcontrol_launch_dependents();
  if (group == kGroups) {
    hopper::setmaxnreg_dec<32>();
    if (thread == 0) {
      const int bytes = Tile::parts * shape.tile_bytes;  // of one row group in a stage
      const int64_t apart = int64_t{shape.steps} * shape.tile_bytes;
      const unsigned char* const from = packed + down * Tile::row_groups * apart + int64_t{first} * bytes;
      const auto a_of = [&](int k, int r) { return from + r * apart + int64_t{k} * bytes; };
      const auto load_a = [&](int k, int stage) {
        ptx::mbarrier_arrive_expect_tx(&full[stage], Tile::row_groups * bytes + Tile::dense_bytes);
#pragma unroll
        for (int r = 0; r < Tile::row_groups; ++r)
          hopper::bulk_load(a_of(k, r), tiles + stage * shape.stage_bytes + Tile::dense_bytes + r * bytes, &full[stage],
                            bytes);
      };
      const auto load_dense = [&](int k, int stage) {
#pragma unroll
        for (int box = 0; box < Tile::boxes; ++box) {
          unsigned char* const to = tiles + stage * shape.stage_bytes + box * Tile::box_bytes;
          if constexpr (Tile::linear)
            hopper::tma_load_2d(dense_map, to, &full[stage], (first + k) * Tile::depth + box * kPackedColumns, column0);
          else
            hopper::tma_load_3d(dense_map, to, &full[stage], column0 + box * kWide, (first + k) * (Tile::depth / 8), 0);
        }
      };
      // Each row of tiles begins at another step: otherwise all would request the same part of B from the L2 at once.
      const int turn = down % many;
      const auto turned = [&](int n) { return n + turn < many ? n + turn : n + turn - many; };
      // The previous kernel may have written A, and its writes are visible only after griddepcontrol.wait. Before that,
      // A is prefetched into the L2 only.
      for (int n = 0; n < min(many, kEarly); ++n)
#pragma unroll
        for (int r = 0; r < Tile::row_groups; ++r) hopper::bulk_prefetch(a_of(turned(n), r), bytes);
      ptx::griddepcontrol_wait();
      for (int n = 0; n < min(many, kEarly); ++n) load_a(turned(n), n), load_dense(turned(n), n);
      for (int n = kEarly, stage = kEarly, parity = 1; n < many; ++n, ++stage) {
        if (stage == shape.stages) stage = 0, parity ^= 1;
        if (n >= shape.stages) ptx::mbarrier_wait(&empty[stage], parity);
        load_a(turned(n), stage), load_dense(turned(n), stage);
      }
    }
    __syncwarp();
    if (shares > 1) ptx::cluster_wait();
  } else {
    hopper::setmaxnreg_inc<112>();
    const int row_group = group % Tile::row_groups, part = group / Tile::row_groups;
    const uint32_t heads = ptx::shared_address(tiles) + Tile::dense_bytes +
                           (row_group * Tile::parts + part) * shape.tile_bytes + 4 * thread;
    const uint64_t dense =
        Tile::linear
            ? hopper::smem_descriptor(tiles + part * Tile::box_bytes)
            : hopper::smem_descriptor(tiles + part * kEight, Tile::boxes > 1 ? Tile::box_bytes : 16, Tile::begin_of(4));
    float acc[Tile::columns / 2];
    int stage = 0;
    unsigned parity = 0;
    using Fragments = uint32_t[4][4];
    const auto unpack = [&](Fragments& fragments) {
      ptx::mbarrier_wait(&full[stage], parity);
      const uint32_t at_head = heads + stage * shape.stage_bytes, head = load_shared(at_head);
      const uint32_t begin = at_head - 4 * thread + kPackedHeads + (head >> 16);
      // Four independent address chains: within a step each address depends on the load before.
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        uint32_t at = begin + 4 * __popc(head & ((1u << 4 * s) - 1));
#pragma unroll
        for (int i = 0; i < 4; ++i) fragments[s][i] = next_pair(head, 1u << (4 * s + i), at);
      }
    };
    const auto multiply = [&](Fragments& fragments, bool more) {
      const uint64_t b = dense + (static_cast<unsigned>(stage * shape.stage_bytes) >> 4);
      hopper::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s)
        hopper::wgmma_rs<T, !Tile::linear>(acc, fragments[s], b + (Tile::begin_of(s) >> 4), more || s > 0);
      hopper::wgmma_commit_group();
    };
    const auto go_on = [&] {
      const int done = stage;
      if (++stage == shape.stages) stage = 0, parity ^= 1;
      return done;
    };
    const auto leave = [&](int done) {
      hopper::wgmma_wait_group<0>();
      ptx::mbarrier_arrive(&empty[done]);  // each thread, after its own reads
    };
    if constexpr (Tile::overlaps) {
      Fragments even, odd;
      unpack(even), multiply(even, false);
      int done = go_on(), n = 1;
      for (; n + 1 < many; n += 2) {
        unpack(odd), leave(done), multiply(odd, true), done = go_on();
        unpack(even), leave(done), multiply(even, true), done = go_on();
      }
      leave(done);
      if (n < many) unpack(odd), multiply(odd, true), hopper::wgmma_wait_group<0>();
    } else {  // other warpgroups unpack meanwhile
      Fragments fragments;
      for (int n = 0; n < many; ++n) unpack(fragments), multiply(fragments, n > 0), leave(go_on());
    }
    hopper::warpgroup_fence_operand(acc);
    hopper::named_barrier_sync(1, kMultiply);  // all have read the last tile, and no load into it is in flight
    float* const sums = reinterpret_cast<float*>(tiles);
    const int row = group * kPackedRows + thread / 32 * 16 + lane / 4;  // parts one after another
#pragma unroll
    for (int j = 0; j < Tile::columns / 8; ++j) {
      float* const to = sums + row * Tile::stride + 8 * j + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = {acc[4 * j], acc[4 * j + 1]};
      *reinterpret_cast<float2*>(to + 8 * Tile::stride) = {acc[4 * j + 2], acc[4 * j + 3]};
    }
    hopper::named_barrier_sync(1, kMultiply);
    const int own = static_cast<int>(threadIdx.x) / Tile::across, c = static_cast<int>(threadIdx.x) % Tile::across * 8;
    const auto add_parts = [&](int r, float (&x)[8]) {
#pragma unroll
      for (int p = 0; p < Tile::parts; ++p) add(sums + (p * Tile::rows + r) * Tile::stride + c, x);
    };
    if (shares > 1) {
      ptx::cluster_wait();  // the other blocks' barriers are initialized
      for (int r = own; r < Tile::rows; r += Tile::apart) {
        const int to = static_cast<int>(static_cast<unsigned>(r) / shape.own_rows);
        if (to == share) continue;
        float x[8] = {};
        add_parts(r, x);
        const int slot = (share < to ? share : share - 1) * shape.own_rows + r - to * shape.own_rows;
        const uint32_t there = ptx::mapa(others + slot * Tile::columns + c, to), barrier = ptx::mapa(received, to);
        hopper::st_async(there, x[0], x[1], x[2], x[3], barrier);
        hopper::st_async(there + 16, x[4], x[5], x[6], x[7], barrier);
      }
      ptx::mbarrier_wait(received, 0);
    }
    ptx::griddepcontrol_wait();  // before out is written
    const auto others_of = [&](int from, int r) {
      return others + ((from < share ? from : from - 1) * shape.own_rows + r - own_row) * Tile::columns;
    };
    const int end = min(end_row, shape.rows - row0);
    const auto store = [&](int64_t at, const float (&x)[8]) {
      ptx::store(result.out + at, {hopper::pack2<T>(x[0], x[1]), hopper::pack2<T>(x[2], x[3]),
                                   hopper::pack2<T>(x[4], x[5]), hopper::pack2<T>(x[6], x[7])});
    };
    if constexpr (Tile::linear) {  // eight outputs of one row of x
      for (int i = static_cast<int>(threadIdx.x); i < (end - own_row) / 8 * Tile::columns; i += kMultiply) {
        const int r = own_row + i / Tile::columns * 8, column = i % Tile::columns;
        if (column0 + column >= shape.n) continue;
        float x[8] = {};
        for (int from = 0; from < shares; ++from)
#pragma unroll
          for (int j = 0; j < 8; ++j)
            if (from == share)
#pragma unroll
              for (int p = 0; p < Tile::parts; ++p) x[j] += sums[(p * Tile::rows + r + j) * Tile::stride + column];
            else
              x[j] += others_of(from, r + j)[column];
        if (result.bias != nullptr)
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] += static_cast<float>(result.bias[row0 + r + j]);
        store((column0 + column) * result.stride + row0 + r, x);
      }
    } else {
      for (int r = own_row + own; r < (column0 + c < shape.n ? end : 0); r += Tile::apart) {
        float x[8] = {};
        for (int from = 0; from < shares; ++from)
          if (from == share)
            add_parts(r, x);
          else
            add(others_of(from, r) + c, x);
        store((row0 + r) * result.stride + column0 + c, x);
      }
    }
  }
#endif
}

// The layout of a block's shared memory: stages, barriers, rows received from other blocks.
template <class Tile>
struct Room {
  int tile_bytes, stage_bytes, own_rows, sent_bytes, stages;

  Room(const spmm::PackedCall& c, int shares)
      : tile_bytes(static_cast<int>(c.packed.size(1)) * 2),
        stage_bytes(Tile::dense_bytes + up(kGroups * tile_bytes, 1024) * 1024),
        own_rows(up(up(Tile::rows, 8), shares) * 8),
        sent_bytes((shares - 1) * own_rows * Tile::columns * 4),
        stages(std::min(kMostStages, (kHopperBlockBytes - kBarriers - sent_bytes) / stage_bytes)) {}
  bool is_enough() const { return stages >= kEarly && stages * stage_bytes >= Tile::sums_bytes; }
  int bytes() const { return stages * stage_bytes + kBarriers + sent_bytes; }
};

struct Cluster {
  int64_t cost;
  int shares;
};

// The cluster size with the least estimated cycles of the busiest multiprocessor, as measured on an H100: 432 products
// of 12 shapes within 6 % on average. 36 of them were timed with every cluster size: another size was faster by more
// than 1 % in 3 of them, by 4 % at most.
template <class Tile>
Cluster cluster_of(const spmm::PackedCall& c) {
  const int64_t n = c.n(), tiles = ceil_of(c.layout.rows, Tile::rows) * ceil_of(n, Tile::columns);
  const int all = c.layout.steps / Tile::parts;
  Cluster best{INT64_MAX, 1};
  for (int shares = 1; shares <= std::min(kMostBlocks, all); ++shares) {
    const Room<Tile> room(c, shares);
    if (!room.is_enough()) continue;
    const int at_once = clusters_at_once<packed_kernel<Tile>, kThreads, kHopperBlockBytes>(shares);
    if (at_once == 0) continue;
    const int64_t waves = ceil_of(tiles, at_once);
    const double active = static_cast<double>(std::min<int64_t>(tiles, at_once)) / at_once;
    // The slower of unpacking with wgmma and fetching: A's bytes, and B's rows of 128 bytes by how long their global
    // reads are.
    const double unpack = Tile::columns <= 32 ? 550 : Tile::columns == 64 ? 710 : 1140;
    const double row = Tile::linear || Tile::aside > 1 || n > 64 ? 3.6 : n > 32 ? 3 : n > 16 ? 4 : 7.5;
    const double fetch = kGroups * room.tile_bytes / 26. + Tile::dense_bytes / kRowBytes * row * (1 + active) / 2;
    const double sent = shares > 1 ? 33. * Tile::columns * Tile::row_groups : 0;
    const double each = 3700 + (up(all, shares) - 1) * std::max(unpack, fetch) + sent + 17. * Tile::columns;
    const auto cost = static_cast<int64_t>(static_cast<double>(waves) * each);
    if (cost < best.cost) best = {cost, shares};
  }
  return best;
}

template <class Tile>
CUtensorMap map_of(const spmm::PackedCall& c) {
  using T = typename Tile::T;
  const cuuint64_t n = c.n(), columns = c.layout.columns, row = c.dense.stride(0) * int64_t{sizeof(T)};
  const void* const from = c.dense.const_data_ptr();
  if constexpr (Tile::linear)
    return tensor_map<T, 2>(spmm::kOp, from, {columns, n}, {row}, {kPackedColumns, Tile::columns});
  else
    return tensor_map<T, 3>(spmm::kOp, from, {n * Tile::aside, columns / 8, 8 / Tile::aside},
                            {8 * row, Tile::aside * row}, {kWide, Tile::depth / 8, 8 / Tile::aside});
}

template <class Tile>
void launch(const spmm::PackedCall& c, const at::Tensor& out, int shares) {
  using T = typename Tile::T;
  const PackedLayout& m = c.layout;
  const int64_t n = c.n(), across = ceil_of(n, Tile::columns), down = ceil_of(m.rows, Tile::rows);
  const int all = m.steps / Tile::parts;
  const Room<Tile> room(c, shares);
  Launch launch(dim3(shares, static_cast<unsigned>(down), static_cast<unsigned>(across)), kThreads, room.bytes());
  launch.in_clusters(shares);
  launch.programmatic();
  launch(packed_kernel<Tile>, map_of<Tile>(c), static_cast<const unsigned char*>(c.packed.const_data_ptr()),
         Result<T>{out.mutable_data_ptr<T>(), out.stride(0), c.bias.defined() ? c.bias.const_data_ptr<T>() : nullptr},
         Shape{static_cast<int>(m.rows), static_cast<int>(n), m.steps, all / shares, all % shares, room.stages,
               room.stage_bytes, room.tile_bytes, room.own_rows});
}

template <class T, int columns, int aside = 1>
void multiply(const spmm::PackedCall& c, const at::Tensor& out) {
  using All = Tile<T, columns, aside, 1>;
  using Half = Tile<T, columns, aside, 2>;
  using One = Tile<T, columns, aside, 4>;
  const Cluster all = cluster_of<All>(c), half = cluster_of<Half>(c), one = cluster_of<One>(c);
  if (one.cost <= half.cost && one.cost <= all.cost) return launch<One>(c, out, one.shares);
  half.cost <= all.cost ? launch<Half>(c, out, half.shares) : launch<All>(c, out, all.shares);
}

template <class T>
void multiply(const spmm::PackedCall& c, const at::Tensor& out) {
  const int64_t n = c.n();
  if (c.layout.in_order) {
    constexpr int linear = 0;
    if (n <= 8) return multiply<T, 8, linear>(c, out);
    if (n <= 16) return multiply<T, 16, linear>(c, out);
    if (n <= 32) return multiply<T, 32, linear>(c, out);
    return n <= 64 ? multiply<T, 64, linear>(c, out) : multiply<T, 128, linear>(c, out);
  }
  if (c.dense.stride(0) == n) {  // the rows of B are contiguous
    if (n == 8) return multiply<T, 8, 8>(c, out);
    if (n == 16) return multiply<T, 16, 4>(c, out);
    if (n == 32) return multiply<T, 32, 2>(c, out);
  }
  n <= 32 ? multiply<T, 32>(c, out) : n <= 64 ? multiply<T, 64>(c, out) : multiply<T, 128>(c, out);
}

}  // namespace

namespace spmm {

using at::Tensor;

bool can_go_packed(const PackedCall& c) {
  const PackedLayout& m = c.layout;
  const Tensor &dense = c.dense, &packed = c.packed;
  if (dense.element_size() != 2 || dense.dim() != 2 || dense.size(m.in_order ? 1 : 0) != m.columns ||
      dense.numel() == 0 || m.columns % 8 != 0 || (m.in_order && m.rows % 8 != 0) || dense.stride(1) != 1 ||
      !of_vectors(dense.unsqueeze(0)) || m.down > kMostBlocksAcross || ceil_of(c.n(), 2 * kWide) > kMostBlocksAcross ||
      dense.stride(0) < dense.size(1) || dense.stride(0) >= int64_t{1} << 36 || !has_hopper_kernels(dense.get_device()))
    return false;
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(0) == m.tiles() && packed.size(1) % (kPackedUnit / 2) == 0 &&
                        packed.size(1) >= kLeastPackedUnits * (kPackedUnit / 2) &&
                        packed.size(1) <= kMostPackedUnits * (kPackedUnit / 2) && packed.is_contiguous() &&
                        reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % 16 == 0 &&
                        packed.scalar_type() == dense.scalar_type() && packed.device() == dense.device(),
                    kOp, ": expected what csr_packed made of this matrix in ", dense.scalar_type(), ", got ",
                    packed.sizes(), " in ", packed.scalar_type());
  return true;
}

Tensor run_packed(const PackedCall& c) {
  const OperationGuard guard(kOp, c.dense);
  const int64_t rows = c.layout.rows, n = c.n();
  const Tensor out = c.layout.in_order ? empty({n, rows}, c.dense.options()) : empty({rows, n}, c.dense.options());
  if (out.numel() == 0) return out;
  c.dense.scalar_type() == at::kHalf ? multiply<c10::Half>(c, out) : multiply<c10::BFloat16>(c, out);
  return out;
}

}  // namespace spmm
}  // namespace matmuls
#endif
