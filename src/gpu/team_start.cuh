// Blocks that wait for each other, without a cooperative launch: that would start only once its whole grid fits.
//
// Rule: a block waits for another block only if that block is known to run. The blocks that wait for each other form a
// team. Each of them arrives at its team's counter, when it starts or later, before it waits for others:
//
//    all have arrived         together: from here on they may wait for each other
//    not all within 2 ms      a block closes the team: its member (a block, or a cluster) does the team's whole work
//                             alone, and all others, whenever they arrive, do none of it (absent)
//
// So a launch makes progress as long as one member can run, whatever other kernels occupy the GPU for however long.
#pragma once

#include <cstdint>

#include "gpu/ptx.cuh"

namespace matmuls {

// Zero between launches.
struct TeamStart {
  unsigned arrived;  // number of blocks; once the team is closed also kTeamClosed and the member that closed it
  unsigned left;     // number of blocks of a closed team that have ended
};

enum class TeamMode : int { together, alone, absent };

constexpr unsigned kTeamClosed = 1u << 31;
constexpr unsigned kTeamReady = 1u << 30;  // set by the member that works alone, see wait_for_team_with_scratch
constexpr int kMemberShift = 16;           // members up to 2^14, blocks up to 2^16

// 2 ms at 1.98 GHz, more than products in place of most sizes take: blocks that only have to wait for the first blocks
// of their own launch to end are not given up.
constexpr long long kPatience = 4'000'000;

#if __CUDA_ARCH__ >= 900

// Called once by one thread of each block.
__device__ inline void arrive_at_team(TeamStart* team) { atomicAdd(&team->arrived, 1); }

// Waits until all `blocks` blocks have arrived or the team is closed. Called by one thread of each block after it has
// arrived. member: of this block, in the team.
__device__ inline TeamMode wait_for_team(TeamStart* team, unsigned blocks, unsigned member) {
  const long long begin = clock64();
  while (true) {
    unsigned seen = ptx::load_relaxed(&team->arrived);
    if (!(seen & kTeamClosed)) {
      if (seen >= blocks) return TeamMode::together;
      if (clock64() - begin <= kPatience) continue;
      const unsigned closed = kTeamClosed | member << kMemberShift | seen;
      if (atomicCAS(&team->arrived, seen, closed) != seen) continue;
      seen = closed;
    }
    const bool own = (seen & ~(kTeamClosed | kTeamReady)) >> kMemberShift == member;
    return own ? TeamMode::alone : TeamMode::absent;
  }
}

// The same for members that are clusters. A member that works alone needs memory of which the kernel has one piece per
// GPU: on return it has taken the piece's lock. rank: of this block in its cluster.
__device__ inline TeamMode wait_for_team_with_scratch(TeamStart* team, unsigned blocks, unsigned member, unsigned rank,
                                                      unsigned* lock) {
  const TeamMode mode = wait_for_team(team, blocks, member);
  if (mode != TeamMode::alone) return mode;
  if (rank == 0) {
    while (atomicCAS(lock, 0, 1) != 0) __nanosleep(1000);
    __threadfence();
    atomicOr(&team->arrived, kTeamReady);
  } else {
    while (!(ptx::load_acquire(&team->arrived) & kTeamReady)) __nanosleep(1000);
  }
  return mode;
}

// Called by one thread of the cluster after both blocks have used the memory.
__device__ inline void give_back_scratch(unsigned* lock) {
  __threadfence();
  atomicExch(lock, 0);
}

// Called by one thread of each block of a team that is together, which counts blocks in no other way: the last one to
// leave sets the counter to zero.
__device__ inline void leave_team(TeamStart* team, unsigned blocks) { ptx::increment(&team->arrived, 2 * blocks - 1); }

// Called by one thread of each block of a closed team, after its last access to the team's counters. True for the last
// block: the other counters of the team may be set to zero.
__device__ inline bool leave_closed_team(TeamStart* team, unsigned blocks) {
  __threadfence();
  if (atomicAdd(&team->left, 1) + 1 != blocks) return false;
  team->arrived = team->left = 0;
  return true;
}

#endif

}  // namespace matmuls
