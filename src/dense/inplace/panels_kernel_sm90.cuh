// The kernel of panels_sm90.cu: a <- a @ op(b) + bias over a's own rows, on Hopper.
//
// A cluster of two blocks takes two neighbouring panels of a's rows and one tile of the result's columns. Each block
// loads its own tile of a and half of b's tile, which is multicast to both. The clusters that share a pair of panels,
// one per tile of columns, form a team:
//
//                columns 0 .. | columns 1 .. | columns 2 ..
//    panel 2 p    cluster 0,  |  cluster 1,  |  cluster 2,     one team
//    panel 2 p+1  2 blocks    |  2 blocks    |  2 blocks
//
// A panel may be overwritten once the whole team has loaded its last tile of it; a counter in global memory tells when.
// Until then the results wait (16-bit in registers, others in shared memory) while the next pair is computed. The next
// pair has its own counter, since a block may finish it while another still reads this pair. At most two pairs are in
// flight: results of the pair after the next need this pair's staging space, which is free once all of this pair has
// been stored; they are staged before its last step.
//
// Roles in a block: one warp loads tiles ahead, across panel ends; one counts panels read; one stores results; one or
// two warpgroups multiply.
//
// The blocks of a team wait for each other. A team of which not all blocks run is closed (gpu/team_start.cuh): one of
// its clusters then computes all tiles of its panels, one after the other. The results of a pair of panels wait in
// global memory until all of the pair's tiles have been computed. With programmatic dependent launch the kernel may
// start while the previous kernel of its stream ends; that kernel's blocks are all running by then, since it allows the
// next launch only once all of them have started.
#pragma once

#include "dense/inplace/panels_sm90.cuh"

namespace matmuls::in_place {
namespace {

// A block's tile of the result: 64 rows for each of `groups` warpgroups, by `columns` columns. It is stored in parts of
// 128 bytes per row, staged in two buffers per warpgroup: part p in buffer p % 2.
template <class T, int groups_, int columns_, int stages_>
struct Tile {
  static constexpr int groups = groups_, columns = columns_, stages = stages_;
  static constexpr int rows = 64 * groups, wide = kRowBytes / sizeof(T);  // wide: columns of a box, and K of a stage
  static constexpr int parts = columns / wide;
  static constexpr int a_bytes = rows * kRowBytes, b_bytes = columns * kRowBytes;
  static constexpr int part_bytes = 64 * kRowBytes;
  static constexpr int barriers = 2 * stages + 4 * groups + 5;  // and the team's mode
  static constexpr int shared =
      stages * (a_bytes + b_bytes) + groups * 2 * part_bytes + columns * static_cast<int>(sizeof(float)) + 8 * barriers;
  static constexpr int threads = (groups + 1) * kGroup;
  static_assert(shared <= kMaxShared && (parts <= 4 || sizeof(T) == 4));

  // Memory of the results of a pair of panels, for a cluster that works alone.
  static constexpr int64_t scratch(int64_t across) { return kPair * across * columns * rows * sizeof(T); }

  // Phase of the staging buffer of a part. use: earlier uses of the second buffer, parts / 2 in each tile. With an odd
  // number of parts the first buffer is used once more in each tile.
  static __device__ unsigned phase(unsigned use, int part) {
    return (use + (parts % 2 && part % 2 == 0 ? use / (parts / 2) : 0) + part / 2) % 2;
  }
};

struct Shape {
  int rows, columns, pairs, across, steps;  // pairs of panels, tiles across the result, K stages
};

__device__ TeamCounters counters[kCounterSlots][kTeams];

// Results of the cluster that works alone; one such cluster per GPU at a time, which holds the lock.
constexpr int64_t kScratchBytes = 16 << 20;
__device__ __align__(128) unsigned char scratch[kScratchBytes];  // bulk copies need 16
__device__ unsigned scratch_lock;

template <class T, class Tile, bool b_k_apart>
__global__ void __launch_bounds__(Tile::threads, 1)
    panels_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                  const __grid_constant__ CUtensorMap out_map, const T* bias, const Shape shape, TeamCounters* spare,
                  int slot) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool transposed_tile = kTransposedTile<T, b_k_apart>;
  constexpr int a_bytes = transposed_tile ? Tile::b_bytes : Tile::a_bytes,
                b_bytes = transposed_tile ? Tile::a_bytes : Tile::b_bytes;
  constexpr int high = kPair * Tile::rows / Tile::parts;  // rows of a part of a transposed tile
  extern __shared__ __align__(1024) unsigned char tiles[];
  unsigned char* const outs = tiles + Tile::stages * (Tile::a_bytes + Tile::b_bytes);
  float* const biases = reinterpret_cast<float*>(outs + Tile::groups * 2 * Tile::part_bytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(biases + Tile::columns);
  uint64_t* const empty = full + Tile::stages;
  uint64_t* const staged = empty + Tile::stages;  // [part % 2][group]
  uint64_t* const unstaged = staged + 2 * Tile::groups;
  uint64_t* const received = unstaged + 2 * Tile::groups;  // [turn % 2]: the last tile of a panel has arrived
  uint64_t *const decided = received + 2, *const copied = decided + 1;
  TeamMode* const mode = reinterpret_cast<TeamMode*>(copied + 1);  // valid once decided
  const auto a_tile = [&](int stage) { return tiles + stage * a_bytes; };
  const auto b_tile = [&](int stage) { return tiles + Tile::stages * a_bytes + stage * b_bytes; };
  const auto out_part = [&](int buffer, int group) {
    return outs + (buffer * Tile::groups + group) * Tile::part_bytes;
  };

  // A team of one cluster owns its panels, one per block, and needs no counter, unless both blocks read the same rows
  // (transposed).
  const bool meet = transposed_tile || shape.across > 1;
  const unsigned rank = ptx::cluster_rank();
  const int cluster = blockIdx.x / kPair, teams = gridDim.x / kPair / shape.across;
  const int team = cluster / shape.across;
  // First column of the block's tile; with i > 0, of tile i of a cluster that works alone.
  const auto column_of = [&](int i) {
    const int tile = cluster % shape.across + i;
    return (tile < shape.across ? tile : tile - shape.across) * Tile::columns +
           (transposed_tile ? static_cast<int>(rank) * Tile::columns / kPair : 0);
  };
  const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  TeamCounters* const own = (spare ? spare : counters[slot]) + team;
  unsigned* const counter = own->read;
  const unsigned team_blocks = kPair * shape.across;
  const auto wait_for_mode = [&] {
    if (!meet) return TeamMode::together;
    ptx::mbarrier_wait(decided, 0);
    return *mode;
  };
  if (threadIdx.x == 0) {
    hopper::prefetch_tensormap(a_map);
    hopper::prefetch_tensormap(b_map);
    hopper::prefetch_tensormap(out_map);
    for (int s = 0; s < Tile::stages; ++s) {
      ptx::mbarrier_init(&full[s]);
      ptx::mbarrier_init(&empty[s], kPair * Tile::groups);
    }
    for (int i = 0; i < 2 * Tile::groups; ++i) {
      ptx::mbarrier_init(&staged[i], kGroup / 32);
      ptx::mbarrier_init(&unstaged[i]);
    }
    ptx::mbarrier_init(&received[0]);
    ptx::mbarrier_init(&received[1]);
    ptx::mbarrier_init(decided);
    ptx::mbarrier_init(copied);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // Both blocks count their steps alike: step n uses stage n % stages.
  if (group == Tile::groups) {
    hopper::setmaxnreg_dec<40>();
    if (thread == 0) {  // loading thread
      unsigned n = 0;
      const auto load_tile = [&](int pair, int column0) {
        const int row = (kPair * pair + (transposed_tile ? 0 : rank)) * Tile::rows;
        for (int k = 0; k < shape.steps; ++k, ++n) {
          const int stage = n % Tile::stages;
          // Both blocks must have read this stage: half of b goes to both.
          ptx::mbarrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
          ptx::mbarrier_arrive_expect_tx(&full[stage], a_bytes + b_bytes);
          constexpr uint16_t both = (1 << kPair) - 1;
          if constexpr (transposed_tile) {
            hopper::tma_load_2d_multicast(both, a_map, a_tile(stage) + rank * Tile::a_bytes, &full[stage],
                                          k * Tile::wide, row + rank * Tile::rows);
#pragma unroll
            for (int c = 0; c < Tile::columns / kPair; c += Tile::wide)
              hopper::tma_load_2d(b_map, b_tile(stage) + c * kRowBytes, &full[stage], column0 + c, k * Tile::wide);
            continue;
          }
          hopper::tma_load_2d(a_map, a_tile(stage), &full[stage], k * Tile::wide, row);
          if constexpr (b_k_apart) {
            constexpr int chunks = (Tile::parts + kPair - 1) / kPair;  // the second block may have one chunk less
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
              const int c = rank * chunks + i;
              if (Tile::parts % kPair && c == Tile::parts) break;
              hopper::tma_load_2d_multicast(both, b_map, b_tile(stage) + c * Tile::wide * kRowBytes, &full[stage],
                                            column0 + c * Tile::wide, k * Tile::wide);
            }
          } else {
            constexpr int half = Tile::columns / kPair;
            hopper::tma_load_2d_multicast(both, b_map, b_tile(stage) + rank * half * kRowBytes, &full[stage],
                                          k * Tile::wide, column0 + rank * half);
          }
        }
      };
      // The first tile is the same in all modes.
      load_tile(team, column_of(0));
      const TeamMode now = wait_for_mode();
      const int tiles = now == TeamMode::alone ? shape.across : 1;
      for (int i = 1; i < tiles; ++i) load_tile(team, column_of(i));
      for (int pair = team + teams; now != TeamMode::absent && pair < shape.pairs; pair += teams)
        for (int i = 0; i < tiles; ++i) load_tile(pair, column_of(i));
    } else if (thread == 96 && meet) {
      arrive_at_team(&own->start);
      *mode = wait_for_team_with_scratch(&own->start, team_blocks, cluster % shape.across, rank, &scratch_lock);
      ptx::mbarrier_arrive(decided);
    } else if (thread == 64 && meet) {  // counting thread: the others proceed during its fence
      unsigned turn = 0;
      if (wait_for_mode() == TeamMode::together)
        for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
          ptx::mbarrier_wait(&received[turn % 2], turn / 2 % 2);
          ptx::add_release(counter + turn % 2, 1);
        }
    } else if (thread == 32) {  // storing thread
      const TeamMode now = wait_for_mode();
      unsigned use = 0, turn = 0;  // use: phase of the staging buffers
      const auto leave = [&](int buffer) {
        for (int g = 0; g < Tile::groups; ++g) ptx::mbarrier_arrive(&unstaged[buffer * Tile::groups + g]);
      };
      const auto wait_for_staged = [&](int part, int g) {
        ptx::mbarrier_wait(&staged[part % 2 * Tile::groups + g], Tile::phase(use, part));
      };
      // Stores what a buffer holds, a part of the tile from `column0` on, to a.
      const auto store_part = [&](int pair, int column0, int part, int g, int buffer) {
        const int row = (kPair * pair + (transposed_tile ? 0 : rank)) * Tile::rows;
        for (int box = 0; box < (transposed_tile ? 2 : 1); ++box) {
          const int x = column0 + (transposed_tile ? 2 * g + box : part) * Tile::wide;
          const int y = row + (transposed_tile ? part * high : g * 64);
          if (x < shape.columns && y < shape.rows)
            hopper::tma_store_2d(out_map, out_part(buffer, g) + box * high * kRowBytes, x, y);
        }
      };
      if (now == TeamMode::together) {
        const int column0 = column_of(0);
        for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
          for (int part = 0; part < Tile::parts; ++part) {
            for (int g = 0; g < Tile::groups; ++g) {
              wait_for_staged(part, g);
              if (part == 0 && g == 0 && meet) {
                while (ptx::load_acquire(counter + turn % 2) < (turn / 2 + 1) * team_blocks) __nanosleep(20);
                hopper::fence_proxy_async();
              }
              store_part(pair, column0, part, g, part % 2);
            }
            hopper::bulk_commit_group();
            if (part % 2 == 1) {
              hopper::bulk_wait_group_read<1>();
              leave(0);
              hopper::bulk_wait_group_read<0>();
              leave(1);
            }
          }
          if constexpr (Tile::parts % 2) {  // the last part is alone
            hopper::bulk_wait_group_read<0>();
            leave(0);
          }
          use += Tile::parts / 2;
        }
        // All reads of the team are counted by now; further increments of the first counter count the blocks that
        // leave.
        if (meet && ptx::add_acquire_release(counter, 1) == ((turn + 1) / 2 + 1) * team_blocks - 1)
          counter[0] = counter[1] = own->start.arrived = 0;
      } else if (now == TeamMode::alone) {
        constexpr int last = (Tile::parts - 1) % 2;  // the buffer of a tile's last part
        const auto scratch_of = [&](int i, int part, int g) {
          const int64_t place = ((int64_t{rank} * shape.across + i) * Tile::parts + part) * Tile::groups + g;
          return scratch + place * Tile::part_bytes;
        };
        unsigned tile = 0, copies = 0;
        for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
          for (int i = 0; i < shape.across; ++i, ++tile) {
            ptx::mbarrier_wait(&received[tile % 2], tile / 2 % 2);
            for (int part = 0; part < Tile::parts; ++part) {
              for (int g = 0; g < Tile::groups; ++g) {
                wait_for_staged(part, g);
                hopper::bulk_store(scratch_of(i, part, g), out_part(part % 2, g), Tile::part_bytes);
              }
              hopper::bulk_commit_group();
              hopper::bulk_wait_group_read<0>();
              if (i + 1 < shape.across || part + 1 < Tile::parts) leave(part % 2);
            }
            use += Tile::parts / 2;
          }
          // Both blocks have read the pair's rows.
          ptx::add_release(counter + turn % 2, 1);
          while (ptx::load_acquire(counter + turn % 2) < (turn / 2 + 1) * kPair) __nanosleep(20);
          hopper::bulk_wait_group_all();
          hopper::fence_proxy_async();
          for (int i = 0; i < shape.across; ++i)
            for (int part = 0; part < Tile::parts; ++part)
              for (int g = 0; g < Tile::groups; ++g) {
                ptx::mbarrier_arrive_expect_tx(copied, Tile::part_bytes);
                hopper::bulk_load(scratch_of(i, part, g), out_part(last, g), copied, Tile::part_bytes);
                ptx::mbarrier_wait(copied, copies++ % 2);
                store_part(pair, column_of(i), part, g, last);
                hopper::bulk_commit_group();
                hopper::bulk_wait_group_read<0>();
              }
          leave(last);
        }
        hopper::bulk_wait_group_all();
      }
      if (now != TeamMode::together && leave_closed_team(&own->start, team_blocks)) counter[0] = counter[1] = 0;
    }
  } else {
    hopper::setmaxnreg_inc<Tile::groups == 1 ? 240 : 232>();
    const auto bias_of = [&](int column0) {
      const int column = column0 + static_cast<int>(threadIdx.x);
      return bias && threadIdx.x < Tile::columns && column < shape.columns ? static_cast<float>(bias[column]) : 0.0f;
    };
    float own_bias = bias_of(column_of(0));  // loaded during the first pair
    const int warp = thread / 32, lane = thread % 32;
    float acc[Tile::columns / 2];  // 64 rows per warpgroup
    // 16-bit results leave their registers while the next pair is multiplied: half of them with its first step, the
    // other half midway, when the team has long finished reading.
    constexpr bool narrow = sizeof(T) == 2;
    uint32_t held[narrow ? Tile::columns / 4 : 1];
    unsigned n = 0, use = 0, turn = 0;
    const auto release = [&](int stage) {  // one thread per block of the cluster
      if (thread < kPair) hopper::mbarrier_arrive_remote(&empty[stage], thread);
    };
    const auto with_bias = [&](int j) -> float4 {  // eight columns from 8 j: two columns in each of two rows
      const float* const four = acc + 4 * j;
      if (!bias) return {four[0], four[1], four[2], four[3]};
      const auto [left, right] = *reinterpret_cast<const float2*>(biases + 8 * j + 2 * (lane % 4));
      return {four[0] + left, four[1] + right, four[2] + left, four[3] + right};
    };
    // Transposed product: this thread's rows of the product (columns of the result) start at 4 * place(0) and 4 *
    // place(1) within its warp's 32; b's fragments use the same places. Then the four k and eight columns that a warp
    // reads at once are in different banks, and so are the eight columns and four rows of the result that it writes.
    const auto place = [&](int h) { return 2 * warp % 4 + h ^ lane / 16 * 5; };
    const auto fragments = [&](uint32_t (&fragment)[4][4], unsigned n) {
      const int at = n % Tile::stages;
      ptx::mbarrier_wait(&full[at], n / Tile::stages % 2);
      hopper::load_tf32_fragments(fragment, b_tile(at) + (2 * group + warp / 2) * 32 * kRowBytes, place(0), place(1),
                                  lane);
    };
    // Swizzled, so that the 8 rows that a warp writes at once are in different banks.
    const auto stage = [&](auto first) {  // stages two parts, or the last one alone
#pragma unroll
      for (int buffer = 0; buffer < std::min(2, Tile::parts - first); ++buffer) {
        const int part = first + buffer;
        ptx::mbarrier_wait(&unstaged[buffer * Tile::groups + group], Tile::phase(use, part) ^ 1);
        unsigned char* const out = out_part(buffer, group);
        if constexpr (transposed_tile) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int x = lane / 4 % 4;  // one of four columns
            const float bias_value = bias ? biases[64 * group + warp / 2 * 32 + 4 * place(h) + x] : 0;
#pragma unroll
            for (int i = 0; i < high / 4; ++i) {
              const int y = i / 2 * 8 + 2 * (lane % 4) + i % 2;
              *reinterpret_cast<float*>(out + (warp / 2 * high + y) * kRowBytes + (place(h) ^ y % 8) * 16 + 4 * x) =
                  acc[part * high / 2 + i / 2 * 4 + 2 * h + i % 2] + bias_value;
            }
          }
        } else {
          constexpr int eights = Tile::wide / 8;
#pragma unroll
          for (int j = 0; j < eights; ++j) {
            if constexpr (narrow) {
              if (j % 2 == 0) {  // 16 rows of 16 columns: each lane passes the address of 8 columns of a row
                const uint32_t* const four = held + 2 * (part * eights + j);
                hopper::stmatrix_x4(out + (warp * 16 + lane % 16) * kRowBytes + ((j + lane / 16) ^ lane % 8) * 16,
                                    four[0], four[1], four[2], four[3]);
              }
            } else {
              const auto [a, b, c, d] = with_bias(part * eights + j);
              unsigned char* const to =
                  out + (warp * 16 + lane / 4) * kRowBytes + ((2 * j + lane % 4 / 2) ^ lane / 4) * 16 + lane % 2 * 8;
              *reinterpret_cast<float2*>(to) = {a, b};
              *reinterpret_cast<float2*>(to + 8 * kRowBytes) = {c, d};
            }
          }
        }
        hopper::fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&staged[buffer * Tile::groups + group]);
      }
    };
    using Zero = std::integral_constant<int, 0>;
    using Two = std::integral_constant<int, 2>;
    const auto stage_all = [&]<int... i>(std::integer_sequence<int, i...>) {
      (stage(std::integral_constant<int, 2 * i>()), ...);
    };
    using Halves = std::make_integer_sequence<int, (Tile::parts + 1) / 2>;
    const int late = shape.steps / 2;
    unsigned tiles = (shape.pairs - team + teams - 1) / teams;
    TeamMode now = TeamMode::together;
    for (; turn < tiles; ++turn) {
      const auto step = [&](int k, uint32_t (&fragment)[4][4], uint32_t (&next)[4][4]) {
        const int at = n % Tile::stages;
        if constexpr (!transposed_tile) ptx::mbarrier_wait(&full[at], n / Tile::stages % 2);
        hopper::warpgroup_fence_operand(acc);
        hopper::wgmma_fence();
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // 32 bytes of K each
          const unsigned char* const rows = a_tile(at) + group * 64 * kRowBytes;
          if constexpr (transposed_tile)
            hopper::wgmma_rs<float, false>(acc, fragment[part], hopper::smem_descriptor(a_tile(at) + part * 32),
                                           k > 0 || part > 0);
          else if constexpr (b_k_apart)
            hopper::wgmma_ss<T, true>(
                acc, hopper::smem_descriptor(rows + part * 32),
                hopper::smem_descriptor(b_tile(at) + part * 16 * kRowBytes, Tile::wide * kRowBytes), k > 0 || part > 0);
          else
            hopper::wgmma_ss<T, false>(acc, hopper::smem_descriptor(rows + part * 32),
                                       hopper::smem_descriptor(b_tile(at) + part * 32), k > 0 || part > 0);
        }
        hopper::wgmma_commit_group();
        if (k + 1 == shape.steps && threadIdx.x == 0) ptx::mbarrier_arrive(&received[turn % 2]);
        if (narrow && turn > 0) {
          if (k == 0) stage(Zero());
          if constexpr (Tile::parts > 2) {
            if (k == late) stage(Two());
          }
          if (k == late) use += Tile::parts / 2;
        }
        hopper::warpgroup_fence_operand(acc);
        if constexpr (transposed_tile) {  // the other warpgroup's products run meanwhile
          if (k + 1 < shape.steps) fragments(next, n + 1);
          hopper::wgmma_wait_group<0>();
          hopper::warpgroup_fence_operand(acc);
          release(at);
        } else {
          hopper::wgmma_wait_group<1>();
          if (k > 0) release((n - 1) % Tile::stages);
        }
        ++n;
      };
      uint32_t even[4][4], odd[4][4];  // fragments of b for the step in flight and the next one
      if constexpr (transposed_tile) {
        fragments(even, n);
        for (int k = 0; k < shape.steps; k += 2) {
          step(k, even, odd);
          if (k + 1 < shape.steps) step(k + 1, odd, even);
        }
      } else {
        for (int k = 0; k < shape.steps; ++k) step(k, even, odd);
        hopper::wgmma_wait_group<0>();
        hopper::warpgroup_fence_operand(acc);
        release((n - 1) % Tile::stages);
      }
      if (turn == 0) {
        now = wait_for_mode();
        if (now == TeamMode::absent) break;
        if (now == TeamMode::alone) tiles *= shape.across;
      }
      if (bias && (turn == 0 || now == TeamMode::alone)) {
        if (turn > 0) {
          own_bias = bias_of(column_of(static_cast<int>(turn % shape.across)));
          hopper::named_barrier_sync(1, Tile::groups * kGroup);  // the biases of the previous tile have been read
        }
        if (threadIdx.x < Tile::columns) biases[threadIdx.x] = own_bias;
        hopper::named_barrier_sync(1, Tile::groups * kGroup);
      }
      if constexpr (narrow) {
#pragma unroll
        for (int j = 0; j < Tile::columns / 8; ++j) {
          const auto [a, b, c, d] = with_bias(j);
          held[2 * j] = hopper::pack2<T>(a, b), held[2 * j + 1] = hopper::pack2<T>(c, d);
        }
      } else {
        stage_all(Halves());
        use += Tile::parts / 2;
      }
    }
    if constexpr (narrow) {
      if (now != TeamMode::absent) stage_all(Halves());
    }
  }
  __syncwarp();  // the warps of the loading, counting and storing threads
  // The other block may still signal this block's barriers.
  ptx::cluster_arrive();
  ptx::cluster_wait();
  if (meet && rank == 0 && threadIdx.x == 0 && *mode == TeamMode::alone) give_back_scratch(&scratch_lock);
#endif
}

}  // namespace
}  // namespace matmuls::in_place
