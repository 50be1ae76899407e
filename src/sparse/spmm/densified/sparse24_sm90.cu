// out = A @ B in 16 bits with A in 2:4 form (densified.h), by sparse wgmma on Hopper.
//
//   B of few columns: bound by L2 traffic, A once and B once per tile of rows
//     cluster = `peers` tiles of rows x `shares` of K; each peer loads a part of B's tile and multicasts it to all
//   B of many columns: bound by shared memory, of which sparse wgmma reads twice as much in the time as dense wgmma
//     tiles as large as registers allow; peers are tiles of columns, which share A's tiles
//
// The shares of K are added up through distributed shared memory, always in the same order. In a block one warp loads
// and two warpgroups multiply. They multiply the nonzeros beyond 2:4 last, row by row: earlier, while tiles were
// loading, these loads waited 3 us behind the tiles (H200, 4096 x 4096, 90 % zeros).
#ifdef __CUDACC__

#include "gpu/hopper.cuh"
#include "gpu/launch.cuh"
#include "gpu/tensor_map.h"
#include "gpu/vector_io.cuh"
#include "sparse/spmm/densified/densified.cuh"

namespace matmuls {
namespace {

constexpr int kRowBytes = 128, kWide = 64;  // a row of B's tile: 64 numbers
constexpr int kGroup = 128, kGroups = 2, kThreads = kGroup * (kGroups + 1);
constexpr int kMostBlocks = 8;  // of a cluster

// high: blocks of 64 rows that a warpgroup multiplies.
template <class T_, int columns_, int high_>
struct Tile {
  using T = T_;
  static constexpr int columns = columns_, high = high_, rows = kGroups * high * 64, parts = rows / kTileRows;
  static constexpr bool wide = columns > kWide;               // peers share A's tiles instead of B's
  static constexpr int boxes = std::max(columns / kWide, 1);  // of B
  static constexpr int a_bytes = parts * sizeof(NarrowStepOfTile), box_bytes = kWide * kRowBytes;
  static constexpr int stage_bytes = a_bytes + boxes * box_bytes, stages = (204 << 10) / stage_bytes;
  static constexpr int shared = stages * stage_bytes + 2 * stages * 8;
  static constexpr int out_stride = columns + 8;  // floats; rows that a warp writes together lie in different banks
  // threads per row of the result, rows between those of a thread
  static constexpr int across = columns / 8, apart = kGroups * kGroup / across;
  static constexpr int own = rows / apart, at_once = std::min(own, 4), batches = own / at_once;  // rows per thread
  static_assert(rows * out_stride * 4 <= stages * stage_bytes && shared <= 227 << 10);
};

struct Shape {
  int rows, n, across, steps, peers;  // across: clusters in a row of them; steps of K; peers: tiles of a cluster
  int64_t dense_stride, out_stride;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Adds eight numbers from another block's shared memory, after a cluster barrier.
__device__ inline void add_from(uint32_t remote, float (&sum)[8]) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                 : "r"(remote + 4 * i));
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += x[i];
}
#endif

// A row's entries of `rest`, range.x to range.y, with `ahead` of them prefetched.
struct RestOfRow {
  static constexpr int ahead = 4;
  int2 entry[ahead];

  __device__ void fetch(const int2* rest, int2 range, int from) {
#pragma unroll
    for (int j = 0; j < ahead; ++j) entry[j] = from + j < range.y ? rest[from + j] : int2{0, 0};
  }
  // sum += the row's entries times eight columns of B. The first `ahead` entries have been fetched.
  template <class T>
  __device__ void multiply(const int2* rest, int2 range, const T* dense, int64_t stride, float (&sum)[8]) {
    for (int i = range.x; i < range.y; i += ahead) {
      if (i > range.x) fetch(rest, range, i);
      Words<T, 8> x[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) load_words<16>(dense + entry[j].x * stride, x[j].at);
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        float numbers[8];
        unpack(x[j], numbers);
#pragma unroll
        for (int c = 0; c < 8; ++c)
          if (i + j < range.y) sum[c] = fmaf(__int_as_float(entry[j].y), numbers[c], sum[c]);
      }
    }
  }
};

template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    sparse24_kernel(const __grid_constant__ CUtensorMap dense_map, const NarrowStepOfTile* steps, const int2* rest,
                    const typename Tile::T* dense, typename Tile::T* out, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = typename Tile::T;
  extern __shared__ __align__(1024) unsigned char tiles[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(tiles + Tile::stages * Tile::stage_bytes);
  uint64_t* const empty = full + Tile::stages;
  const int blocks = static_cast<int>(ptx::cluster_blocks()), rank = static_cast<int>(ptx::cluster_rank());
  const int peers = shape.peers, shares = blocks / peers, own_share = rank / peers, peer = rank % peers;
  const int cluster = static_cast<int>(blockIdx.x) / blocks;
  const int down = cluster / shape.across, across = cluster % shape.across;
  const int row_tile = Tile::wide ? down : down * peers + peer, row0 = row_tile * Tile::rows;
  const int column0 = (Tile::wide ? across * peers + peer : across) * Tile::columns;
  const auto share_of = [&](int all, int share) {
    return static_cast<int>(static_cast<int64_t>(share) * all / shares);
  };
  const int first = share_of(shape.steps, own_share), many = share_of(shape.steps, own_share + 1) - first;
  // Uniform in a warp; the compiler infers that only from a shuffle.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int thread = threadIdx.x % kGroup, lane = thread % 32;
  if (threadIdx.x == 0) {
    hopper::prefetch_tensormap(dense_map);
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], kGroups * kGroup + kGroups * kGroup / 32 * (peers - 1));
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the other blocks' barriers are initialized
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (group == kGroups) {
    if constexpr (Tile::wide) hopper::setmaxnreg_dec<40>();
    if (thread == 0) {
      const int last_part = (shape.rows - 1) / kTileRows;  // tiles beyond it load the last one again
      const auto all_peers = static_cast<uint16_t>(((1 << peers) - 1) << own_share * peers);
      const NarrowStepOfTile* from[Tile::parts];
#pragma unroll
      for (int part = 0; part < Tile::parts; ++part)
        from[part] = steps + int64_t{min(row_tile * Tile::parts + part, last_part)} * shape.steps + first;
      const int own_row = Tile::wide ? 0 : kWide / peers * peer;  // of B's tile
      for (int n = 0; n < many; ++n) {
        const int stage = n % Tile::stages, y = (first + n) * kWide + own_row;
        if (n >= Tile::stages) ptx::mbarrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
        unsigned char *const a = tiles + stage * Tile::stage_bytes, *const b = a + Tile::a_bytes + own_row * kRowBytes;
        ptx::mbarrier_arrive_expect_tx(&full[stage], Tile::stage_bytes);
#pragma unroll
        for (int part = 0; part < Tile::parts; ++part) {
          unsigned char* const to = a + part * sizeof(NarrowStepOfTile);
          if (!Tile::wide || peers == 1)
            hopper::bulk_load(from[part] + n, to, &full[stage], sizeof(NarrowStepOfTile));
          else if (part == peer)
            hopper::bulk_load_multicast(all_peers, from[part] + n, to, &full[stage], sizeof(NarrowStepOfTile));
        }
#pragma unroll
        for (int box = 0; box < Tile::boxes; ++box)
          if (!Tile::wide && peers > 1)
            hopper::tma_load_2d_multicast(all_peers, dense_map, b, &full[stage], column0, y);
          else
            hopper::tma_load_2d(dense_map, b + box * Tile::box_bytes, &full[stage], column0 + box * kWide, y);
      }
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    if constexpr (Tile::wide) hopper::setmaxnreg_inc<232>();
    // Each share's block adds up and writes some rows of the tile.
    const int c = static_cast<int>(threadIdx.x) % Tile::across * 8;
    const int own_row = share_of(Tile::rows, own_share) + static_cast<int>(threadIdx.x) / Tile::across;
    const int end_row = column0 + c < shape.n ? min(share_of(Tile::rows, own_share + 1), shape.rows - row0) : 0;
    const auto each_row = [&](int batch, const auto& body) {
#pragma unroll
      for (int i = batch * Tile::at_once; i < (batch + 1) * Tile::at_once; ++i)
        if (const int r = own_row + i * Tile::apart; r < end_row) body(i, r);
    };
    int2 ranges[Tile::own] = {};
#pragma unroll
    for (int batch = 0; batch < Tile::batches; ++batch)
      each_row(batch, [&](int i, int r) { ranges[i] = rest[row0 + r]; });
    RestOfRow beyond[Tile::own];
    const auto fetch = [&](int batch) {
      each_row(batch, [&](int i, int) { beyond[i].fetch(rest, ranges[i], ranges[i].x); });
    };
    float acc[Tile::high][Tile::columns / 2] = {};
    using Places = uint32_t[Tile::high];
    const auto step = [&](int n, Places& places, Places& earlier) {
      const int stage = n % Tile::stages;
      const unsigned char* const a = tiles + stage * Tile::stage_bytes;
      const auto b_from = [&](int k) {
        return hopper::smem_descriptor(a + Tile::a_bytes + k * kRowBytes, Tile::wide ? Tile::box_bytes : 16);
      };
      ptx::mbarrier_wait(&full[stage], n / Tile::stages % 2);
#pragma unroll
      for (int i = 0; i < Tile::high; ++i) {
        const int block = group * Tile::high + i;
        const auto& part = reinterpret_cast<const NarrowStepOfTile*>(a)[block / kGroups];
        places[i] = reinterpret_cast<const uint32_t*>(part.places)[block % kGroups * kGroup + thread];
        hopper::warpgroup_fence_operand(acc[i]);
      }
      hopper::wgmma_fence();
#pragma unroll
      for (int i = 0; i < Tile::high; ++i) {
        const int block = group * Tile::high + i;
        const unsigned char* const own = a + block / kGroups * sizeof(NarrowStepOfTile) +
                                         block % kGroups * 64 * sizeof(NarrowStepOfTile::numbers[0]);
        hopper::wgmma_sparse<T, 0>(acc[i], hopper::smem_descriptor_64b(own), b_from(0), places[i], true);
        hopper::wgmma_sparse<T, 1>(acc[i], hopper::smem_descriptor_64b(own + 32), b_from(32), places[i], true);
      }
      hopper::wgmma_commit_group();
#pragma unroll
      for (int i = 0; i < Tile::high; ++i) hopper::warpgroup_fence_operand(acc[i]);
      hopper::wgmma_wait_group<1>();
#pragma unroll
      for (int i = 0; i < Tile::high; ++i) ptx::opaque(earlier[i]);  // the product before has read it until here
      // Each thread arrives for the metadata that it read; one lane per peer signals the block that multicast data.
      if (n > 0) {
        uint64_t* const read = &empty[(n - 1) % Tile::stages];
        ptx::mbarrier_arrive(read);
        if (lane < peers && lane != peer) hopper::mbarrier_arrive_remote(read, own_share * peers + lane);
      }
    };
    Places even = {}, odd = {};  // metadata registers; a product reads them until it has completed
    for (int n = 0; n < many; n += 2) {
      // The ranges have arrived by now; earlier loads would wait behind those of the tiles.
      if (n == many / 4 * 2) fetch(0);
      step(n, even, odd);
      if (n + 1 < many) step(n + 1, odd, even);
    }
    hopper::wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < Tile::high; ++i)
      hopper::warpgroup_fence_operand(acc[i]), ptx::opaque(even[i]), ptx::opaque(odd[i]);
    hopper::named_barrier_sync(
        1, kGroups * kGroup);  // both warpgroups have read the last tile, and no load into it is in flight
    float* const sums = reinterpret_cast<float*>(tiles);
#pragma unroll
    for (int i = 0; i < Tile::high; ++i) {
      const int row = (group * Tile::high + i) * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < Tile::columns / 8; ++j) {
        float* const to = sums + row * Tile::out_stride + 8 * j + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {acc[i][4 * j], acc[i][4 * j + 1]};
        *reinterpret_cast<float2*>(to + 8 * Tile::out_stride) = {acc[i][4 * j + 2], acc[i][4 * j + 3]};
      }
    }
    ptx::cluster_arrive();
#pragma unroll
    for (int batch = 0; batch < Tile::batches; ++batch) {
      float result[Tile::own][8] = {};
      if (batch + 1 < Tile::batches) fetch(batch + 1);
      each_row(batch, [&](int i, int) {
        beyond[i].multiply(rest, ranges[i], dense + column0 + c, shape.dense_stride, result[i]);
      });
      if (batch == 0) ptx::cluster_wait();
      for (int share = 0; share < shares; ++share)
        each_row(batch, [&](int i, int r) {
          add_from(ptx::mapa(sums + r * Tile::out_stride + c, share * peers + peer), result[i]);
        });
      each_row(batch, [&](int i, int r) {
        const auto& x = result[i];
        ptx::store(out + int64_t{row0 + r} * shape.out_stride + column0 + c,
                   {hopper::pack2<T>(x[0], x[1]), hopper::pack2<T>(x[2], x[3]), hopper::pack2<T>(x[4], x[5]),
                    hopper::pack2<T>(x[6], x[7])});
      });
    }
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // other blocks may still read this block's sums
  ptx::cluster_wait();
#endif
}

struct Cluster {
  int64_t cost;
  int peers, shares;
};

// The cluster with the least estimated cycles of the busiest multiprocessor, as measured on an H200.
template <class Tile>
Cluster cluster_of(int64_t rows, int64_t n, int steps) {
  const int64_t down = up(rows, Tile::rows), across = up(n, Tile::columns);
  Cluster best{INT64_MAX, 1, 1};
  for (const int peers : {4, 2, 1}) {
    if (Tile::wide && peers > std::min<int64_t>(across, 2)) continue;  // of clusters of four too few run at once
    for (int shares = 1; shares <= std::min(kMostBlocks / peers, steps); ++shares) {
      const int64_t clusters = Tile::wide ? down * up(across, peers) : up(down, peers) * across;
      const int at_once = clusters_at_once<sparse24_kernel<Tile>, kThreads, Tile::shared>(peers * shares);
      if (at_once == 0) continue;
      const int64_t step = Tile::wide ? 940 - 25 * peers : 455 + 20 / peers;
      const int64_t begin_and_end = Tile::wide ? 6000 * shares : 3000 + 1000 * shares;
      const int64_t cost = ceil_of(clusters, at_once) * (begin_and_end + up(steps, shares) * step);
      if (cost < best.cost) best = {cost, peers, shares};
    }
  }
  return best;
}

template <class Tile>
void launch(const DensifiedMatrix& a, const at::Tensor& dense, const at::Tensor& out, const Cluster& cluster) {
  using T = typename Tile::T;
  const int64_t rows = out.size(0), n = out.size(1), inner = dense.size(0);
  const int peers = cluster.peers, across = up(up(n, Tile::columns), Tile::wide ? peers : 1);
  const int64_t down = up(up(rows, Tile::rows), Tile::wide ? 1 : peers);
  const int64_t blocks = down * across * peers * cluster.shares;
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, "spmm: expected a smaller result, got one of ", rows, " x ", n);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(inner)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(dense.stride(0)) * sizeof(T)};
  const cuuint32_t box[2] = {kWide, static_cast<cuuint32_t>(Tile::wide ? kWide : kWide / peers)};
  Launch launch(static_cast<unsigned>(blocks), kThreads, Tile::shared);
  launch.in_clusters(peers * cluster.shares);
  launch.programmatic();
  launch(sparse24_kernel<Tile>, tensor_map<T>("spmm", dense.const_data_ptr(), sizes, strides, box),
         static_cast<const NarrowStepOfTile*>(a.parts.const_data_ptr()),
         static_cast<const int2*>(a.rest.const_data_ptr()), dense.const_data_ptr<T>(), out.mutable_data_ptr<T>(),
         Shape{static_cast<int>(rows), static_cast<int>(n), across, up(inner, kWide), peers, dense.stride(0),
               out.stride(0)});
}

template <class T>
void multiply(const DensifiedMatrix& a, const at::Tensor& dense, const at::Tensor& out) {
  const int64_t rows = out.size(0), n = out.size(1);
  const int steps = up(dense.size(0), kWide);
  using Few = Tile<T, 32, 1>;
  using Narrow = Tile<T, 64, 1>;
  using Wide = Tile<T, 128, 2>;
  if (n <= Few::columns) return launch<Few>(a, dense, out, cluster_of<Few>(rows, n, steps));
  const Cluster narrow = cluster_of<Narrow>(rows, n, steps);
  const Cluster wide = n > Narrow::columns ? cluster_of<Wide>(rows, n, steps) : narrow;
  wide.cost < narrow.cost ? launch<Wide>(a, dense, out, wide) : launch<Narrow>(a, dense, out, narrow);
}

}  // namespace

void multiply_sparse24(const DensifiedMatrix& a, const at::Tensor& dense, const at::Tensor& out) {
  TORCH_CHECK_VALUE(out.size(0) <= INT32_MAX / 2 && dense.size(0) <= INT32_MAX / 2 && out.size(1) <= INT32_MAX / 2,
                    "spmm: expected smaller operands, got ", out.sizes(), " and ", dense.sizes());
  dense.scalar_type() == at::kHalf ? multiply<c10::Half>(a, dense, out) : multiply<c10::BFloat16>(a, dense, out);
}

}  // namespace matmuls
#endif
