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
#include "rows/kernels/even_rows.cuh"
#include "rows/kernels/nearly_even.cuh"
#include "rows/kernels/one_pass.cuh"
#include "rows/kernels/persistent.cuh"
#include "rows/kernels/persistent_unaligned.cuh"
#include "rows/kernels/reread.cuh"
#include "rows/kernels/staged.cuh"
#include "rows/kernels/two_pass.cuh"

namespace matmuls {

// Hands one_pass, persistent, cluster or reread, for accesses of V elements, to `use`.
template <class Op, int V, bool unaligned, class Use>
void with_general(const RowChoice& c, const Use& use) {
  static constexpr RowTraits t = Op::kTraits;
  if (c.kernel == RowKernel::reread)
    return use.template operator()<RowKernel::reread, reread_kernel<Op, V, t.most_vectors(V), unaligned>>();
  const auto with = [&]<Scope scope, int NV>() {
    if constexpr (t.has_vectors(scope, V, unaligned, NV)) {
      if constexpr (t.has_one_pass(scope, unaligned))
        if (c.kernel == RowKernel::one_pass)
          return use.template operator()<RowKernel::one_pass, one_pass_kernel<Op, V, NV, scope, unaligned>>();
      if constexpr (t.has_persistent(scope, unaligned))
        if (c.kernel == RowKernel::persistent)
          return use.template operator()<RowKernel::persistent, persistent_kernel<Op, V, NV, scope, unaligned>>();
    }
    not_compiled(c);
  };
  with_instance<kGeneralVectors>(c, [&]<int NV>() {
    switch (c.scope) {
      case Scope::warp: return with.template operator()<Scope::warp, NV>();
      case Scope::block: return with.template operator()<Scope::block, NV>();
      case Scope::cluster: return with.template operator()<Scope::cluster, NV>();
    }
  });
}

template <class Op, bool unaligned, class Use>
void with_kernel_of(const RowChoice& c, const Use& use) {
  static constexpr RowTraits t = Op::kTraits;
  constexpr int V = t.elements_of_vector();
  if constexpr (has_kernel(t, RowKernel::even_rows, unaligned))
    if (c.kernel == RowKernel::even_rows) return with_even_rows<Op, unaligned>(c, use);
  if constexpr (has_kernel(t, RowKernel::nearly_even, unaligned))
    if (c.kernel == RowKernel::nearly_even) return with_nearly_even<Op, unaligned>(c, use);
  if constexpr (has_kernel(t, RowKernel::cluster, unaligned))
    if (c.kernel == RowKernel::cluster) return with_cluster<Op, unaligned>(c, use);
  if constexpr (has_kernel(t, RowKernel::two_pass, unaligned))
    if (c.kernel == RowKernel::two_pass) return with_two_pass<Op>(c, use);
  if constexpr (has_kernel(t, RowKernel::staged, unaligned))
    if (c.kernel == RowKernel::staged) return with_staged<Op>(c, use);
  if constexpr (has_kernel(t, RowKernel::direct, unaligned))
    if (c.kernel == RowKernel::direct) return with_direct<Op>(c, use);
  if constexpr (has_kernel(t, RowKernel::persistent_unaligned, unaligned))
    if (c.kernel == RowKernel::persistent_unaligned) return with_persistent_unaligned<Op>(c, use);
  if constexpr (!t.whole_rows && !unaligned)
    if (c.elements == 1) return with_general<Op, 1, false>(c, use);
  if constexpr (has_kernel(t, RowKernel::one_pass, unaligned))
    with_general<Op, V, unaligned>(c, use);
  else
    not_compiled(c);
}

// Hands the kernel of a choice to `use`: one of those that Op's traits say are compiled.
template <class Op, class Use>
void with_kernel(const RowChoice& c, const Use& use) {
  c.unaligned ? with_kernel_of<Op, true>(c, use) : with_kernel_of<Op, false>(c, use);
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

// True if the GPU has room for a choice. Kernels::with(facts, choice, use) hands the kernel to `use`.
template <class Kernels>
bool has_room(const RowFacts& f, const RowChoice& c) {
  bool room = false;
  Kernels::with(f, c, AskRoom{c, room});
  return room;
}

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

// Chooses a kernel among those of an operation, and launches it.
template <class Kernels, class Make>
void launch_rows(const RowFacts& f, const Make& make) {
  const RowChoice c = choose(f, has_room<Kernels>);
  const auto nothing = [](auto&&...) {};
  Kernels::with(f, c, LaunchRows{f, c, make, nothing});
}

}  // namespace matmuls
