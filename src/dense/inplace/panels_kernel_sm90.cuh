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
// No block waits for one that is not running. The grid is at most what can be resident, and if a team has several
// clusters the launch is cooperative: the GPU starts all blocks or none, whatever other streams run. With programmatic
// dependent launch it may start while the previous kernel of its stream ends; that kernel's blocks are all running by
// then, since it allows the next launch only once all of them have started. Within a team, clusters wait only until all
// have multiplied the same pair, which depends only on earlier pairs.
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
  static constexpr int barriers = 2 * stages + 4 * groups + 2;
  static constexpr int shared =
      stages * (a_bytes + b_bytes) + groups * 2 * part_bytes + columns * static_cast<int>(sizeof(float)) + 8 * barriers;
  static constexpr int threads = (groups + 1) * kGroup;
  static_assert(shared <= kMaxShared && (parts <= 4 || sizeof(T) == 4));

  // Phase of the staging buffer of a part. use: earlier uses of the second buffer, parts / 2 in each tile. With an odd
  // number of parts the first buffer is used once more in each tile.
  static __device__ unsigned phase(unsigned use, int part) {
    return (use + (parts % 2 && part % 2 == 0 ? use / (parts / 2) : 0) + part / 2) % 2;
  }
};

struct Shape {
  int rows, columns, pairs, across, steps;  // pairs of panels, tiles across the result, K stages
};

// Two counters per team, for alternate pairs. The last block to leave resets them to zero.
__device__ unsigned counters[kSlots][kTeams][2];

template <class T, class Tile, bool b_k_apart>
__global__ void __launch_bounds__(Tile::threads, 1)
    inplace_mm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                      const __grid_constant__ CUtensorMap out_map, const T* bias, const Shape shape, unsigned* spare,
                      int slot) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool turned = kTurned<T, b_k_apart>;
  constexpr int a_bytes = turned ? Tile::b_bytes : Tile::a_bytes, b_bytes = turned ? Tile::a_bytes : Tile::b_bytes;
  constexpr int high = kPair * Tile::rows / Tile::parts;  // rows of a part of a transposed tile
  extern __shared__ __align__(1024) unsigned char tiles[];
  unsigned char* const outs = tiles + Tile::stages * (Tile::a_bytes + Tile::b_bytes);
  float* const biases = reinterpret_cast<float*>(outs + Tile::groups * 2 * Tile::part_bytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(biases + Tile::columns);
  uint64_t* const empty = full + Tile::stages;
  uint64_t* const staged = empty + Tile::stages;  // [part % 2][group]
  uint64_t* const unstaged = staged + 2 * Tile::groups;
  uint64_t* const received = unstaged + 2 * Tile::groups;  // [turn % 2]: the last tile of a panel has arrived
  const auto a_tile = [&](int stage) { return tiles + stage * a_bytes; };
  const auto b_tile = [&](int stage) { return tiles + Tile::stages * a_bytes + stage * b_bytes; };
  const auto out_part = [&](int buffer, int group) {
    return outs + (buffer * Tile::groups + group) * Tile::part_bytes;
  };

  // A team of one cluster owns its panels, one per block, and needs no counter, unless both blocks read the same rows
  // (transposed).
  const bool meet = turned || shape.across > 1;
  const unsigned rank = ptx::cluster_rank();
  const int cluster = blockIdx.x / kPair, teams = gridDim.x / kPair / shape.across;
  const int team = cluster / shape.across;
  const int column0 = cluster % shape.across * Tile::columns + (turned ? rank * Tile::columns / kPair : 0);
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
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();

  // Both blocks count their steps alike: step n uses stage n % stages.
  if (group == Tile::groups) {
    hopper::setmaxnreg_dec<40>();
    if (thread == 0) {  // loading thread
      unsigned n = 0;
      for (int pair = team; pair < shape.pairs; pair += teams) {
        const int row = (kPair * pair + (turned ? 0 : rank)) * Tile::rows;
        for (int k = 0; k < shape.steps; ++k, ++n) {
          const int stage = n % Tile::stages;
          // Both blocks must have read this stage: half of b goes to both.
          ptx::barrier_wait(&empty[stage], n / Tile::stages % 2 ^ 1);
          ptx::barrier_expect(&full[stage], a_bytes + b_bytes);
          constexpr uint16_t both = (1 << kPair) - 1;
          if constexpr (turned) {
            hopper::load_for(both, a_map, a_tile(stage) + rank * Tile::a_bytes, &full[stage], k * Tile::wide,
                             row + rank * Tile::rows);
#pragma unroll
            for (int c = 0; c < Tile::columns / kPair; c += Tile::wide)
              hopper::load(b_map, b_tile(stage) + c * kRowBytes, &full[stage], column0 + c, k * Tile::wide);
            continue;
          }
          hopper::load(a_map, a_tile(stage), &full[stage], k * Tile::wide, row);
          if constexpr (b_k_apart) {
            constexpr int chunks = (Tile::parts + kPair - 1) / kPair;  // the second block may have one chunk less
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
              const int c = rank * chunks + i;
              if (Tile::parts % kPair && c == Tile::parts) break;
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
    } else if (thread == 64 && meet) {  // counting thread: the others proceed during its fence
      unsigned turn = 0;
      for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
        ptx::barrier_wait(&received[turn % 2], turn / 2 % 2);
        ptx::add_release(counter + turn % 2, 1);
      }
    } else if (thread == 32) {  // storing thread
      const unsigned team_blocks = kPair * shape.across;
      unsigned use = 0, turn = 0;  // use: phase of the staging buffers
      for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
        const int row = (kPair * pair + (turned ? 0 : rank)) * Tile::rows;
        const auto leave = [&](int buffer) {
          for (int g = 0; g < Tile::groups; ++g) ptx::barrier_arrive(&unstaged[buffer * Tile::groups + g]);
        };
        for (int part = 0; part < Tile::parts; ++part) {
          for (int g = 0; g < Tile::groups; ++g) {
            ptx::barrier_wait(&staged[part % 2 * Tile::groups + g], Tile::phase(use, part));
            if (part == 0 && g == 0 && meet) {
              while (ptx::load_acquire(counter + turn % 2) < (turn / 2 + 1) * team_blocks) __nanosleep(20);
              hopper::order_copies();
            }
            for (int box = 0; box < (turned ? 2 : 1); ++box) {
              const int x = column0 + (turned ? 2 * g + box : part) * Tile::wide;
              const int y = row + (turned ? part * high : g * 64);
              if (x < shape.columns && y < shape.rows)
                hopper::store(out_map, out_part(part % 2, g) + box * high * kRowBytes, x, y);
            }
          }
          hopper::commit_stores();
          if (part % 2 == 1) {
            hopper::wait_for_stores<1>();
            leave(0);
            hopper::wait_for_stores<0>();
            leave(1);
          }
        }
        if constexpr (Tile::parts % 2) {  // the last part is alone
          hopper::wait_for_stores<0>();
          leave(0);
        }
        use += Tile::parts / 2;
      }
      // All reads of the team are counted by now; further increments of the first counter count the blocks that leave.
      if (meet && ptx::add_acquire_release(counter, 1) == ((turn + 1) / 2 + 1) * team_blocks - 1)
        counter[0] = counter[1] = 0;
    }
  } else {
    hopper::setmaxnreg_inc<Tile::groups == 1 ? 240 : 232>();
    float own_bias = 0;  // loaded during the first pair
    if (bias && threadIdx.x < Tile::columns && column0 + threadIdx.x < shape.columns)
      own_bias = static_cast<float>(bias[column0 + threadIdx.x]);
    const int warp = thread / 32, lane = thread % 32;
    float acc[Tile::columns / 2];  // 64 rows per warpgroup
    // 16-bit results leave their registers while the next pair is multiplied: half of them with its first step, the
    // other half midway, when the team has long finished reading.
    constexpr bool narrow = sizeof(T) == 2;
    uint32_t held[narrow ? Tile::columns / 4 : 1];
    unsigned n = 0, use = 0, turn = 0;
    const auto release = [&](int stage) {  // one thread per block of the cluster
      if (thread < kPair) hopper::arrive_at(&empty[stage], thread);
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
      ptx::barrier_wait(&full[at], n / Tile::stages % 2);
      hopper::fragments_of(fragment, b_tile(at) + (2 * group + warp / 2) * 32 * kRowBytes, place(0), place(1), lane);
    };
    // Swizzled, so that the 8 rows that a warp writes at once are in different banks.
    const auto stage = [&](auto first) {  // stages two parts, or the last one alone
#pragma unroll
      for (int buffer = 0; buffer < std::min(2, Tile::parts - first); ++buffer) {
        const int part = first + buffer;
        ptx::barrier_wait(&unstaged[buffer * Tile::groups + group], Tile::phase(use, part) ^ 1);
        unsigned char* const out = out_part(buffer, group);
        if constexpr (turned) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int x = lane / 4 % 4;  // one of four columns
            const float beside = bias ? biases[64 * group + warp / 2 * 32 + 4 * place(h) + x] : 0;
#pragma unroll
            for (int i = 0; i < high / 4; ++i) {
              const int y = i / 2 * 8 + 2 * (lane % 4) + i % 2;
              *reinterpret_cast<float*>(out + (warp / 2 * high + y) * kRowBytes + (place(h) ^ y % 8) * 16 + 4 * x) =
                  acc[part * high / 2 + i / 2 * 4 + 2 * h + i % 2] + beside;
            }
          }
        } else {
          constexpr int eights = Tile::wide / 8;
#pragma unroll
          for (int j = 0; j < eights; ++j) {
            if constexpr (narrow) {
              if (j % 2 == 0) {  // 16 rows of 16 columns: each lane passes the address of 8 columns of a row
                const uint32_t* const four = held + 2 * (part * eights + j);
                hopper::store_matrices(out + (warp * 16 + lane % 16) * kRowBytes + ((j + lane / 16) ^ lane % 8) * 16,
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
        hopper::publish();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(&staged[buffer * Tile::groups + group]);
      }
    };
    using Zero = std::integral_constant<int, 0>;
    using Two = std::integral_constant<int, 2>;
    const auto stage_all = [&]<int... i>(std::integer_sequence<int, i...>) {
      (stage(std::integral_constant<int, 2 * i>()), ...);
    };
    using Halves = std::make_integer_sequence<int, (Tile::parts + 1) / 2>;
    const int late = shape.steps / 2;
    for (int pair = team; pair < shape.pairs; pair += teams, ++turn) {
      const auto step = [&](int k, uint32_t (&fragment)[4][4], uint32_t (&next)[4][4]) {
        const int at = n % Tile::stages;
        if constexpr (!turned) ptx::barrier_wait(&full[at], n / Tile::stages % 2);
        hopper::pin(acc);
        hopper::begin_products();
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // 32 bytes of K each
          const unsigned char* const rows = a_tile(at) + group * 64 * kRowBytes;
          if constexpr (turned)
            hopper::multiply_fragment<float, false>(acc, fragment[part], hopper::descriptor(a_tile(at) + part * 32),
                                                    k > 0 || part > 0);
          else if constexpr (b_k_apart)
            hopper::multiply<T, true>(acc, hopper::descriptor(rows + part * 32),
                                      hopper::descriptor(b_tile(at) + part * 16 * kRowBytes, Tile::wide * kRowBytes),
                                      k > 0 || part > 0);
          else
            hopper::multiply<T, false>(acc, hopper::descriptor(rows + part * 32),
                                       hopper::descriptor(b_tile(at) + part * 32), k > 0 || part > 0);
        }
        hopper::commit_products();
        if (k + 1 == shape.steps && threadIdx.x == 0) ptx::barrier_arrive(&received[turn % 2]);
        if (narrow && turn > 0) {
          if (k == 0) stage(Zero());
          if constexpr (Tile::parts > 2) {
            if (k == late) stage(Two());
          }
          if (k == late) use += Tile::parts / 2;
        }
        hopper::pin(acc);
        if constexpr (turned) {  // the other warpgroup's products run meanwhile
          if (k + 1 < shape.steps) fragments(next, n + 1);
          hopper::wait_for_products<0>();
          hopper::pin(acc);
          release(at);
        } else {
          hopper::wait_for_products<1>();
          if (k > 0) release((n - 1) % Tile::stages);
        }
        ++n;
      };
      uint32_t even[4][4], odd[4][4];  // fragments of b for the step in flight and the next one
      if constexpr (turned) {
        fragments(even, n);
        for (int k = 0; k < shape.steps; k += 2) {
          step(k, even, odd);
          if (k + 1 < shape.steps) step(k + 1, odd, even);
        }
      } else {
        for (int k = 0; k < shape.steps; ++k) step(k, even, odd);
        hopper::wait_for_products<0>();
        hopper::pin(acc);
        release((n - 1) % Tile::stages);
      }
      if (bias && turn == 0) {
        if (threadIdx.x < Tile::columns) biases[threadIdx.x] = own_bias;
        hopper::sync(1, Tile::groups * kGroup);
      }
      if constexpr (narrow) {
#pragma unroll
        for (int j = 0; j < Tile::columns / 8; ++j) {
          const auto [a, b, c, d] = with_bias(j);
          held[2 * j] = hopper::two<T>(a, b), held[2 * j + 1] = hopper::two<T>(c, d);
        }
      } else {
        stage_all(Halves());
        use += Tile::parts / 2;
      }
    }
    if constexpr (narrow) {
      stage_all(Halves());
    }
  }
  __syncwarp();  // the warps of the loading, counting and storing threads
  // The other block may still signal this block's barriers.
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();
#endif
}

}  // namespace
}  // namespace matmuls::in_place
