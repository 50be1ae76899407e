// Whole rows of one input for which a block is too small: clusters walk over them, each thread with as many vectors as
// all others but for the last one. Known numbers of threads and vectors, and what is the same for all rows in
// registers: half the instructions of walking_kernel, for which 16-bit rows wait.
#pragma once

#include "row_kernels.cuh"

namespace matmuls {

constexpr int kWideThreads = 512, kWideVectors = 8;  // of a block, and of a thread at most
constexpr size_t kWideShared = 220 << 10;            // of a block, for rows on their way

template <class Op, int V>
constexpr bool kWide = V > 1 && Op::kInputs == 1 && !Op::kColumnSums && sizeof(typename Op::Storage) <= 4 &&
                       std::is_empty_v<typename Op::template Held<V, 1>>;

// Rows in shared memory: one is written, one folded, the others are on their way.
constexpr size_t wide_row_bytes(int NV) { return size_t{16} * NV * kWideThreads; }
constexpr int wide_stages(int NV) { return std::min(4, static_cast<int>(kWideShared / wide_row_bytes(NV))); }

template <class Op, int V, int NV>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_row_kernel(const __grid_constant__ Op op, const RowShape shape) {
#if __CUDA_ARCH__ >= 900
  using T = typename Op::Storage;
  constexpr int kStages = wide_stages(NV), kConstants = std::max(Op::kConstants, 1);
  Team<Scope::cluster> team;
  const EvenSpan<V, NV, false, false> span{team.rank * V, team.size * V, shape.columns,
                                           (team.rank + (NV - 1) * team.size) * V < shape.columns};
  extern __shared__ __align__(16) unsigned char shared[];
  Words<T, V>* const slots = reinterpret_cast<Words<T, V>*>(shared) + threadIdx.x;
  const auto stage = [&](int s) { return Ahead<T, V, NV, 1>{{slots + s * NV * kWideThreads, kWideThreads}}; };
  const int64_t step = team.count();
  const auto fetch = [&](int64_t r, int s) {
    if (r < shape.rows) stage(s).fetch(op.row(r), span);
    ptx::end_group_ahead();
  };
  int64_t r = team.index;
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) fetch(r + s * step, s);

  Words<T, V> kept[NV][kConstants];
#pragma unroll
  for (int c = 0; c < Op::kConstants; ++c)
#pragma unroll
    for (int i = 0; i < NV; ++i)
      kept[i][c] =
          load_columns<T, V>(op.constant(c), Span<V, false>{span.first, span.step, span.columns}, i, op.absent(c));
  const auto constants = [&](int c, int i, typename Op::F(&numbers)[V]) { unpack(kept[i][c], numbers); };

  typename Op::template Held<V, NV> none;
  ColumnSums<typename Op::F, V, 0> no_sums;
  typename Op::Row before = op.row(min(r, shape.rows - 1));
  int slot = 0, slot_before = 0;
  const auto write = [&](int64_t row_after) {
    op.write(before, op.finish(team.collect(op)), none, span, stage(slot_before), constants, no_sums);
    fetch(row_after, slot_before);
  };
  // A row is written when the next one has been folded: its merge came meanwhile.
  bool any = false;
#pragma unroll 1
  for (; r < shape.rows; r += step) {
    const typename Op::Row row = op.row(r);
    ptx::wait_ahead<kStages - 2>();
    typename Op::State state = Op::identity();
    op.fold(state, none, row, span, stage(slot), constants);
    state = team.template merge_block<true>(op, state);
    if (team.size == kWideThreads)
      team.post_to_itself(state);
    else
      team.post(state);
    if (any) write(r + (kStages - 1) * step);
    any = true;
    before = row;
    slot_before = slot;
    slot = slot + 1 < kStages ? slot + 1 : 0;
  }
  if (any) write(shape.rows);
  team.leave();
#endif
}

}  // namespace matmuls
