// The product in 16 bits of what two of four keep (filled.h) with a dense side of few columns, on Hopper.
//
// Such a product waits for what comes through the L2: A's kept numbers once, and the dense side once for each tile of
// rows. A cluster is `beside` tiles of rows, whose blocks each fetch a part of the dense side's tile for all of them,
// times `shares` of K, whose sums are added up through shared memory, always in the same order. In a block one warp
// fetches, two warpgroups multiply 64 rows each. What two of four do not keep they multiply last, row by row: before,
// while tiles are on their way, its loads waited 3 us behind those (H200, 4096 x 4096, 90 % zeros).
#ifdef __CUDACC__

#include "device.cuh"
#include "filled.cuh"
#include "hopper.cuh"
#include "launch.cuh"
#include "tensor_map.h"

namespace matmuls {
namespace {

constexpr int kRowBytes = 128, kWide = 64;  // of a row of the dense side's tile: 64 numbers
constexpr int kGroup = 128, kGroups = 2, kThreads = kGroup * (kGroups + 1);
constexpr int kMostBlocks = 8;   // of a cluster
constexpr int kStepsOfTile = 8;  // of K, that take as long as a tile's begin and end

template <class T_, int columns_>
struct Tile {
  using T = T_;
  static constexpr int columns = columns_;
  static constexpr int a_bytes = sizeof(NarrowStepOfTile), stage_bytes = a_bytes + kWide * kRowBytes, stages = 12;
  static constexpr int shared = stages * stage_bytes + 2 * stages * 8;
  static constexpr int out_stride = columns + 8;  // floats: rows that a warp writes at a time lie in different banks
  static constexpr int across = columns / 8, apart = kGroups * kGroup / across;  // threads of a row of the result
  static constexpr int own = kTileRows / apart;                                  // rows of a thread, at most
  static_assert(kTileRows * out_stride * 4 <= stages * stage_bytes && shared <= 227 << 10);
};

struct Shape {
  int rows, n, across, steps, beside;  // tiles of columns; steps of K; tiles of rows of a cluster
  int64_t dense_stride, out_stride;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Eight numbers out of another block's shared memory, after a barrier of the cluster.
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

// What two of four do not keep of a row, as many as one looks at ahead.
struct RestOfRow {
  static constexpr int ahead = 4;
  int2 range, entry[ahead];

  __device__ void fetch(const int2* rest, int from) {
#pragma unroll
    for (int j = 0; j < ahead; ++j) entry[j] = from + j < range.y ? rest[from + j] : int2{0, 0};
  }
  // sum <- it times eight columns of the dense side.
  template <class T>
  __device__ void multiply(const int2* rest, const T* dense, int64_t stride, float (&sum)[8]) {
    for (int i = range.x; i < range.y; i += ahead) {
      if (i > range.x) fetch(rest, i);
      Words<T, 8> x[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j) load_constant<16>(dense + entry[j].x * stride, x[j].at);
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
    two_of_four_kernel(const __grid_constant__ CUtensorMap dense_map, const NarrowStepOfTile* steps, const int2* rest,
                       const typename Tile::T* dense, typename Tile::T* out, const Shape shape) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = typename Tile::T;
  extern __shared__ __align__(1024) unsigned char tiles[];
  uint64_t* const full = reinterpret_cast<uint64_t*>(tiles + Tile::stages * Tile::stage_bytes);
  uint64_t* const empty = full + Tile::stages;
  const int blocks = static_cast<int>(ptx::cluster_blocks()), rank = static_cast<int>(ptx::cluster_rank());
  const int shares = blocks / shape.beside, own_beside = rank % shape.beside, own_share = rank / shape.beside;
  const int cluster = static_cast<int>(blockIdx.x) / blocks;
  const int column0 = cluster % shape.across * Tile::columns;
  const int row_tile = cluster / shape.across * shape.beside + own_beside, row0 = row_tile * kTileRows;
  const auto share_of = [&](int all, int share) {
    return static_cast<int>(static_cast<int64_t>(share) * all / shares);
  };
  const int first = share_of(shape.steps, own_share), many = share_of(shape.steps, own_share + 1) - first;
  // The same in a warp, which the compiler knows of a shuffle alone.
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int thread = threadIdx.x % kGroup, lane = thread % 32;
  if (threadIdx.x == 0) {
    hopper::prefetch(dense_map);
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::barrier_init(&full[s]);
      ptx::barrier_init(&empty[s], kGroups * kGroup + kGroups * kGroup / 32 * (shape.beside - 1));
    }
    ptx::barrier_fence();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // the others' barriers are there
  ptx::let_next_start();
  ptx::wait_for_earlier();
  if (group == kGroups) {
    if (thread == 0) {
      const ptx::L2Policy staying = ptx::l2_policy(true);
      const int part = kWide / shape.beside;  // rows of the dense side's tile
      const auto all_beside = static_cast<uint16_t>(((1 << shape.beside) - 1) << own_share * shape.beside);
      const int last_tile = (shape.rows - 1) / kTileRows;  // beyond it the last one's numbers come again
      const NarrowStepOfTile* const from = steps + int64_t{min(row_tile, last_tile)} * shape.steps + first;
      for (int n = 0; n < many; ++n) {
        const int stage = n % Tile::stages;
        if (n >= Tile::stages) ptx::barrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
        unsigned char* const to = tiles + stage * Tile::stage_bytes;
        ptx::barrier_expect(&full[stage], Tile::stage_bytes);
        hopper::load_bytes(from + n, to, &full[stage], sizeof(NarrowStepOfTile), staying);
        unsigned char* const own = to + Tile::a_bytes + own_beside * part * kRowBytes;
        const int y = (first + n) * kWide + own_beside * part;
        if (shape.beside > 1)
          hopper::load_for(all_beside, dense_map, own, &full[stage], column0, y);
        else
          hopper::load(dense_map, own, &full[stage], column0, y);
      }
    }
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    // Of the tile's result a share's block adds up and writes some rows.
    const int c = static_cast<int>(threadIdx.x) % Tile::across * 8;
    const int own_row = share_of(kTileRows, own_share) + static_cast<int>(threadIdx.x) / Tile::across;
    const int end_row = column0 + c < shape.n ? min(share_of(kTileRows, own_share + 1), shape.rows - row0) : 0;
    const auto each_row = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < Tile::own; ++i)
        if (const int r = own_row + i * Tile::apart; r < end_row) body(i, r);
    };
    RestOfRow beyond[Tile::own] = {};
    each_row([&](int i, int r) { beyond[i].range = rest[row0 + r]; });
    float acc[Tile::columns / 2] = {};
    const auto step = [&](int n, uint32_t& places, uint32_t& earlier) {
      const int stage = n % Tile::stages;
      const unsigned char* const a = tiles + stage * Tile::stage_bytes;
      const unsigned char* const own = a + group * 64 * sizeof(NarrowStepOfTile::numbers[0]);
      const auto b_from = [&](int k) { return hopper::descriptor(a + Tile::a_bytes + k * kRowBytes); };
      ptx::barrier_wait(&full[stage], n / Tile::stages % 2);
      places = reinterpret_cast<const uint32_t*>(reinterpret_cast<const NarrowStepOfTile*>(a)->places)[threadIdx.x];
      hopper::pin(acc);
      hopper::begin_products();
      hopper::multiply_two_of_four<T, 0>(acc, hopper::descriptor_of_narrow(own), b_from(0), places, true);
      hopper::multiply_two_of_four<T, 1>(acc, hopper::descriptor_of_narrow(own + 32), b_from(32), places, true);
      hopper::commit_products();
      hopper::pin(acc);
      hopper::wait_for_products<1>();
      ptx::forget(earlier);  // the product before has read it until here
      // Each thread for the places that it has read; a lane of a warp for what another block brought.
      if (n > 0) {
        uint64_t* const read = &empty[(n - 1) % Tile::stages];
        ptx::barrier_arrive(read);
        if (lane < shape.beside && lane != own_beside) hopper::arrive_at(read, own_share * shape.beside + lane);
      }
    };
    uint32_t even = 0, odd = 0;  // places, which a product reads until it has ended
    for (int n = 0; n < many; n += 2) {
      // When the ranges are there; the loads before wait behind those of the tiles.
      if (n == many / 4 * 2) each_row([&](int i, int) { beyond[i].fetch(rest, beyond[i].range.x); });
      step(n, even, odd);
      if (n + 1 < many) step(n + 1, odd, even);
    }
    hopper::wait_for_products<0>();
    hopper::pin(acc);
    ptx::forget(even), ptx::forget(odd);
    hopper::sync(1, kGroups * kGroup);  // both groups have read the last tile, and nothing else is on its way here
    float* const sums = reinterpret_cast<float*>(tiles);
    const int row = group * 64 + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < Tile::columns / 8; ++j) {
      float* const to = sums + row * Tile::out_stride + 8 * j + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = {acc[4 * j], acc[4 * j + 1]};
      *reinterpret_cast<float2*>(to + 8 * Tile::out_stride) = {acc[4 * j + 2], acc[4 * j + 3]};
    }
    ptx::cluster_arrive();
    float result[Tile::own][8] = {};
    each_row([&](int i, int) { beyond[i].multiply(rest, dense + column0 + c, shape.dense_stride, result[i]); });
    ptx::cluster_wait();
    for (int share = 0; share < shares; ++share)
      each_row([&](int i, int r) {
        add_from(ptx::address_in(sums + r * Tile::out_stride + c, share * shape.beside + own_beside), result[i]);
      });
    each_row([&](int i, int r) {
      const auto& x = result[i];
      ptx::store(out + int64_t{row0 + r} * shape.out_stride + column0 + c,
                 {hopper::two<T>(x[0], x[1]), hopper::two<T>(x[2], x[3]), hopper::two<T>(x[4], x[5]),
                  hopper::two<T>(x[6], x[7])});
    });
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // the others may still read this block's sums
  ptx::cluster_wait();
#endif
}

struct Cluster {
  int64_t cost;
  int beside, shares;
};

// The cluster with which the longest of a multiprocessor's work is shortest: steps, and what a tile costs beside, each
// as long as what it brings.
template <class Tile>
Cluster cluster_of(int row_tiles, int across, int steps) {
  Cluster best{INT64_MAX, 1, 1};
  for (const int beside : {4, 2, 1})
    for (int shares = 1; beside * shares <= kMostBlocks; ++shares) {
      const int64_t clusters = int64_t{up(row_tiles, beside)} * across;
      const int at_once = clusters_at_once<two_of_four_kernel<Tile>, kThreads, Tile::shared>(beside * shares);
      const int64_t bytes = Tile::a_bytes + Tile::columns * kWide * 2 / beside;
      const int64_t cost = ceil_of(clusters, at_once) * (kStepsOfTile + up(steps, shares)) * bytes;
      if (cost < best.cost) best = {cost, beside, shares};
    }
  return best;
}

template <class Tile>
void launch(const Filled& a, const at::Tensor& dense, const at::Tensor& out) {
  using T = typename Tile::T;
  const int64_t rows = out.size(0), n = out.size(1), inner = dense.size(0);
  const int row_tiles = up(rows, kTileRows), across = up(n, Tile::columns), steps = up(inner, kWide);
  const Cluster cluster = cluster_of<Tile>(row_tiles, across, steps);
  const int64_t blocks = int64_t{up(row_tiles, cluster.beside)} * across * cluster.beside * cluster.shares;
  TORCH_CHECK(blocks <= INT32_MAX, "spmm: expected a smaller result, got one of ", rows, " x ", n);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(n), static_cast<cuuint64_t>(inner)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(dense.stride(0)) * sizeof(T)};
  const cuuint32_t box[2] = {kWide, static_cast<cuuint32_t>(kWide / cluster.beside)};
  Launch launch(static_cast<unsigned>(blocks), kThreads, Tile::shared);
  launch.in_clusters(cluster.beside * cluster.shares);
  launch.early();
  launch(two_of_four_kernel<Tile>, tensor_map<T>("spmm", dense.const_data_ptr(), sizes, strides, box),
         static_cast<const NarrowStepOfTile*>(a.parts.const_data_ptr()),
         static_cast<const int2*>(a.rest.const_data_ptr()), dense.const_data_ptr<T>(), out.mutable_data_ptr<T>(),
         Shape{static_cast<int>(rows), static_cast<int>(n), across, steps, cluster.beside, dense.stride(0),
               out.stride(0)});
}

}  // namespace

void multiply_two_of_four(const Filled& a, const at::Tensor& dense, const at::Tensor& out) {
  TORCH_CHECK(out.size(0) <= INT32_MAX / 2 && dense.size(0) <= INT32_MAX / 2 && out.size(1) <= INT32_MAX / 2,
              "spmm: expected smaller operands, got ", out.sizes(), " and ", dense.sizes());
  const auto by_type = [&]<class T>(T) {
    out.size(1) <= 32 ? launch<Tile<T, 32>>(a, dense, out) : launch<Tile<T, 64>>(a, dense, out);
  };
  dense.scalar_type() == at::kHalf ? by_type(c10::Half()) : by_type(c10::BFloat16());
}

}  // namespace matmuls
#endif
