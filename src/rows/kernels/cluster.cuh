// cluster: a persistent kernel for rows that are too long for a block: a cluster of blocks shares a row. All threads
// hold the same number of vectors, except that some lack the last one.
//
// Thread and vector counts are compile-time constants, and values that all rows share stay in registers. That halves
// the instructions of persistent_kernel, which limit 16-bit rows. The edge elements of an unaligned row go one each to
// the first threads.
#pragma once

#include "rows/device/operation.cuh"
#include "rows/kernel_sizes.h"

namespace matmuls {

template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(kClusterThreads, 1)
    cluster_kernel(const __grid_constant__ Op op, const RowShape shape) {
#if __CUDA_ARCH__ >= 900
  using T = typename Op::Storage;
  constexpr int K = Op::kInputs, kStages = cluster_stages(NV * K), kConstants = std::max(Op::kConstants, 1);
  static_assert(!ragged || Op::kConstants == 0);
  Team<Scope::cluster> team;
  const auto share = [&](const Inside& in) {
    const int first = in.first + team.rank * V, step = team.size * V;
    return EvenSpan<V, NV, false, ragged && Op::kEnds>{first, step, in.end, first + (NV - 1) * step < in.end};
  };
  const auto all = share({0, shape.columns});  // for aligned rows: known before the first row
  const auto span_of_row = [&](const typename Op::Row& row) {
    if constexpr (ragged)
      return share(inside_of<V>(row.input(0), shape.columns));
    else
      return all;
  };
  extern __shared__ __align__(16) unsigned char shared[];
  Words<T, V>* const slots = reinterpret_cast<Words<T, V>*>(shared) + threadIdx.x;
  const auto stage = [&](int s) { return Ahead<T, V, NV, K>{{slots + s * NV * K * kClusterThreads, kClusterThreads}}; };
  const int64_t step = team.count();
  const auto fetch = [&](int64_t r, int s) {
    if (r < shape.rows) {
      const typename Op::Row row = op.row(r);
      stage(s).fetch(row, span_of_row(row));
    }
    ptx::cp_async_commit_group();
  };
  RowEnds<Op> ends_before, ends, ends_after;
  const auto fetch_ends = [&](int64_t r) {
    if (!ragged || r >= shape.rows) return;
    const typename Op::Row row = op.row(r);
    ends_after.load(row, inside_of<V>(row.input(0), shape.columns), team.rank, shape.columns);
  };
  int64_t r = team.index;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(r + s * step, s);
  fetch_ends(r);

  Words<T, V> kept[NV][kConstants];
#pragma unroll
  for (int c = 0; c < Op::kConstants; ++c)
#pragma unroll
    for (int i = 0; i < NV; ++i)
      kept[i][c] =
          load_columns<T, V>(op.constant(c), Span<V, false>{all.first, all.step, all.columns}, i, op.absent(c));
  const auto constants = [&](int c, int i, typename Op::F(&numbers)[V]) { unpack(kept[i][c], numbers); };

  typename Op::template Held<V, NV> none;
  ColumnSums<typename Op::F, V, 0> no_sums;
  typename Op::Row before = op.row(min(r, shape.rows - 1));
  int slot = 0, slot_before = 0;
  const auto write = [&](int64_t row_after) {
    const auto result = op.finish(team.collect(op));
    op.write(before, result, none, span_of_row(before), stage(slot_before), constants, no_sums);
    if constexpr (ragged) ends_before.write(op, before, result);
    fetch(row_after, slot_before);
  };
  // A row is written after the next one has been folded; its merge completes meanwhile.
  bool any = false;
#pragma unroll 1
  for (; r < shape.rows; r += step) {
    const typename Op::Row row = op.row(r);
    ends = ends_after;
    fetch_ends(r + step);
    ptx::cp_async_wait_group<kStages - 2>();
    typename Op::State state = Op::identity();
    op.fold(state, none, row, span_of_row(row), stage(slot), constants);
    if constexpr (ragged) ends.fold(op, state, row);
    state = team.template merge_block<true>(op, state);
    if (team.size == kClusterThreads)
      team.post_to_itself(state);
    else
      team.publish(state);
    if (any) write(r + (kStages - 1) * step);
    any = true;
    before = row;
    ends_before = ends;
    slot_before = slot;
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }
  if (any) write(shape.rows);
  team.leave();
#endif
}

// Hands the kernel of a choice to `use`.
template <class Op, bool ragged, class Use>
void with_cluster(const RowChoice& c, const Use& use) {
  static constexpr auto kCompiled = cluster_vectors(Op::kTraits);
  with_instance<kCompiled>(c, [&]<int NV>() {
    use.template operator()<RowKernel::cluster, cluster_kernel<Op, Op::kTraits.elements_of_vector(), NV, ragged>>();
  });
}

}  // namespace matmuls
