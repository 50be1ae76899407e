// Launches the kernel that rows/choose.h chose for a row operation.
//
// The threads that share a row (rows/device/team.cuh) each load their part of it as 16-byte vectors, fold it into a
// small state, merge their states and write their part of the result: one read and one write of memory where the row
// fits. Each kernel has a file in rows/kernels/, whose with_... function maps a choice to the kernel that is compiled
// for it and hands that to `use`. An operation (rows/device/operation.cuh) says what to fold, how states merge and what
// to write; rows/softmax_backward.cu has the simplest.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "gpu/launch.cuh"
#include "rows/device/row_index.cuh"
#include "rows/device/shapes.h"
#include "rows/facts.h"
#include "rows/kernels/cluster.cuh"
#include "rows/kernels/one_pass.cuh"
#include "rows/kernels/persistent.cuh"
#include "rows/kernels/reread.cuh"

namespace matmuls {

// Hands one of the general kernels, for accesses of V elements, to `use`.
template <class Op, int V, bool unaligned, class Use>
void with_general_of(const RowChoice& c, const Use& use) {
  constexpr int kMost = Op::kTraits.most_vectors(V);
  const auto scoped = [&]<int NV, Scope scope>() {
    if constexpr (Op::kTraits.has_one_pass(scope, unaligned))
      if (c.kernel == RowKernel::one_pass)
        return use.template operator()<RowKernel::one_pass, one_pass_kernel<Op, V, NV, scope, unaligned>>();
    if constexpr (Op::kTraits.has_persistent(scope, unaligned))
      if (c.kernel == RowKernel::persistent)
        return use.template operator()<RowKernel::persistent, persistent_kernel<Op, V, NV, scope, unaligned>>();
    if (c.kernel != RowKernel::reread) not_compiled(c);
    use.template operator()<RowKernel::reread, reread_kernel<Op, V, kMost, unaligned>>();
  };
  if constexpr (!unaligned && Op::kTraits.clusters(V))
    if (c.kernel == RowKernel::cluster) return with_cluster<Op, false>(c, use);
  if constexpr (Op::kTraits.threes(V, unaligned))
    if (c.scope == Scope::block && c.vectors == 3) return scoped.template operator()<3, Scope::block>();
  if (c.scope == Scope::block) return scoped.template operator()<kMost, Scope::block>();
  if constexpr (V > 1) {
    if (c.scope == Scope::cluster) {
      if constexpr (!Op::kTraits.long_clusters())
        if (c.vectors == kMost) return scoped.template operator()<kMost, Scope::cluster>();
      return scoped.template operator()<Op::kTraits.long_vectors, Scope::cluster>();
    }
    if constexpr (!unaligned) {
      const auto warps = [&]<int NV>() { scoped.template operator()<std::min(NV, kMost), Scope::warp>(); };
      switch (c.vectors) {
        case 1: return warps.template operator()<1>();
        case 2: return warps.template operator()<2>();
        case 3: return warps.template operator()<3>();
      }
    }
  }
  scoped.template operator()<kMost, Scope::warp>();  // unaligned: one kernel for all short rows
}

// Hands one_pass, persistent, cluster or reread to `use`.
template <class Op, class Use>
void with_general(const RowChoice& c, const Use& use) {
  constexpr int V = Op::kTraits.elements_of_vector();
  if constexpr (Op::kTraits.whole_rows) {
    with_general_of<Op, V, false>(c, use);
  } else {
    if (c.elements == 1) return with_general_of<Op, 1, false>(c, use);
    c.unaligned ? with_general_of<Op, V, true>(c, use) : with_general_of<Op, V, false>(c, use);
  }
}

// One block, or cluster, of a choice: its grid is for the caller to set.
class RowLaunch : public Launch {
 public:
  explicit RowLaunch(const RowChoice& c) : Launch(c.blocks_per_row, dim3(c.threads, c.rows_per_block), c.shared) {
    if (c.scope == Scope::cluster) in_clusters(c.blocks_per_row);
  }
};

// A `use` that sets `room`: true if the GPU can run a block, or a cluster, of the choice.
struct AskRoom {
  const RowChoice& c;
  bool& room;
  template <RowKernel kind, auto kernel>
  void operator()() const {
    if constexpr (needs_room(kind)) room = resident<kernel>(RowLaunch(c).config, c.blocks_per_row) > 0;
  }
};

// A `use` that launches. make.operator()<Op>() returns the operation; prepare(op, teams) is called before the launch of
// a persistent or staged kernel: an operation with column sums needs it.
template <class Make, class Prepare>
struct LaunchRows {
  const RowFacts& f;
  const RowChoice& c;
  const Make& make;
  const Prepare& prepare;

  template <RowKernel kind, auto kernel>
  void operator()() const {
    launch<kind, kernel>(kernel);
  }

 private:
  template <RowKernel kind, auto kernel, class Op, class Shape>
  void launch(void (*)(Op, Shape)) const {
    static_assert(sizeof(typename Op::State) == Op::kTraits.state);
    Op op = make.template operator()<Op>();
    RowLaunch launch(c);
    const RowGrid grid = grid_of(f, c, resident_of<kind, kernel>(launch));
    launch.config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
    if constexpr (kind == RowKernel::persistent || kind == RowKernel::persistent_unaligned || kind == RowKernel::staged)
      prepare(op, grid.teams);
    if constexpr (kind != RowKernel::persistent && kind != RowKernel::cluster) launch.programmatic();
    launch(kernel, op, shape<kind>(grid, Op::kInputs));
  }
  template <RowKernel kind, auto kernel>
  int resident_of(const Launch& launch) const {
    if constexpr (needs_room(kind) && kind != RowKernel::two_pass)
      return resident<kernel>(launch.config, c.blocks_per_row);
    return 0;
  }
  template <RowKernel kind>
  auto shape(const RowGrid& grid, int inputs) const {
    const auto columns = static_cast<int>(f.columns);
    const int64_t bytes = f.rows * f.columns * inputs * f.element;
    const RowShape row{f.rows, columns, bytes > device_limits().l2};
    if constexpr (kind == RowKernel::persistent) {
      // With at least 128 rows per team, teams with four rows more than others cost at most 3 %.
      const bool fours = f.rows >= 128 * (grid.blocks / c.blocks_per_row);
      return WalkShape{row, c.stages, fours};
    } else if constexpr (kind == RowKernel::staged) {
      return TileShape{f.rows, columns, c.tile_rows, grid.tiles_per_warp, c.tile_tensor_bytes, c.tile_bytes};
    } else if constexpr (kind == RowKernel::two_pass) {
      return HeldShape{row, c.waiting_parts};
    } else {
      return row;
    }
  }
};
constexpr auto kNothingToPrepare = [](auto&&...) {};

}  // namespace matmuls
