// persistent: the resident blocks or clusters loop over the rows, two to four of them in flight in shared memory. For
// sums over the rows, constants that are best kept, and rows that fill a multiprocessor.
#pragma once

#include <algorithm>

#include "rows/device/operation.cuh"

namespace matmuls {

// True if the rows of a block differ in alignment, and so in each thread's columns.
template <Scope scope, bool ragged>
constexpr bool kOwnConstants = scope == Scope::warp && ragged;

// True if a thread's elements stay in shared memory: registers do not hold them and the sums.
template <class Op, int V, int NV>
constexpr bool kStaysShared = V > 1 && NV > Op::kTraits.held_vectors;

// Threads per block for __launch_bounds__. 16-bit rows without sums get 80 registers, ragged ones 72, so that three
// blocks of 256 or 288 threads run at once.
template <class Op, Scope scope, bool ragged>
constexpr int kWalkBound =
    scope == Scope::block && !Op::kColumnSums && !Op::kTraits.is_long() && sizeof(typename Op::Storage) == 2
        ? (ragged ? 896 : 768)
        : Op::kTraits.most_persistent(scope, ragged);

// True if a team may take four consecutive rows. Rows whose length is not a multiple of 128 bytes then share cache
// lines within one multiprocessor: gradient of 1000 float32 columns at 0.957 of a copy, 0.914 without; of 8192 at
// 0.970, 0.965 without; with 16 rows at a time 0.957 and 0.955.
template <class Op, int V, Scope scope, bool ragged>
constexpr bool kTakesFours = Op::kColumnSums && V > 1 && scope == Scope::block && !ragged;

// True if all teams of a block hold the same columns, so that their sums are added up in the block.
template <int V, Scope scope, bool ragged>
constexpr bool kAddsTeams = scope == Scope::warp && V > 1 && !ragged;

// Adds the sums of a block's teams, in order, into those of the first team. `shared` holds one vector per thread.
template <class F, int V, int NV>
__device__ void add_teams(ColumnSums<F, V, NV>& sums, F* shared) {
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int s = 0; s < 2; ++s)
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < V; ++j) shared[j * threads + thread] = sums.at[s][i][j];
      __syncthreads();
      if (threadIdx.y > 0) continue;
#pragma unroll 1
      for (int n = thread + blockDim.x; n < threads; n += blockDim.x)
#pragma unroll
        for (int j = 0; j < V; ++j) sums.at[s][i][j] += shared[j * threads + n];
    }
}

// The persistent kernel: the resident teams loop over the rows, with the next rows in flight (cp.async).
template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(kWalkBound<Op, scope, ragged>,
                                  std::max(1, Op::kTraits.threads_per_sm / persistent_threads(scope)))
    persistent_kernel(const __grid_constant__ Op op, const WalkShape shape) {
#if __CUDA_ARCH__ < 900
  if constexpr (scope == Scope::cluster) return;  // never launched there; a fifth of the compiled code
#endif
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr int K = Op::kInputs;
  constexpr bool kAhead = V > 1, kShared = kStaysShared<Op, V, NV>, kOwn = kOwnConstants<scope, ragged>;
  Team<scope> team;
  const int row_in_block = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t teams = scope == Scope::warp ? blockDim.y : 1;  // per block
  const int64_t step = team.count() * teams;

  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  Words<T, V>* const slots = reinterpret_cast<Words<T, V>*>(shared);
  const int keepers = kOwn ? threads : blockDim.x;
  const Slots<T, V> kept{slots + (kOwn ? thread : threadIdx.x), keepers};
  const auto constants = [&](int c, int i, F(&numbers)[V]) { unpack(kept[i * Op::kConstants + c], numbers); };
  // Several short rows lie in 256 bytes. Gradients of 128 columns at 0.90 and 0.94 of a copy; 0.89 and 0.93 with 128.
  using Stage = Ahead<T, V, NV, K, scope == Scope::warp && !ragged ? 256 : 128>;
  const auto stage = [&](int s) {
    return Stage{{slots + NV * Op::kConstants * keepers + s * NV * K * threads + thread, threads}};
  };
  // The row's own number, one copy per thread.
  F* const numbers =
      reinterpret_cast<F*>(slots + NV * (Op::kConstants * keepers + shape.stages * K * threads)) + thread;

  const auto row_at = [&](int64_t first) {
    return op.row(first + row_in_block < shape.rows ? first + row_in_block : first);
  };
  const auto span_at = [&](const typename Op::Row& row) {
    return span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  };
  Odd<K> odd;
  const auto fetch = [&](int64_t first, int s) {
    if (first < shape.rows) {
      const typename Op::Row row = row_at(first);
      stage(s).fetch(row, span_at(row), odd);
      if constexpr (Op::kNumber) {
#pragma unroll
        for (int w = 0; w < int(sizeof(F) / 4); ++w)
          ptx::cp_async_word(reinterpret_cast<uint32_t*>(numbers + s * threads) + w,
                             reinterpret_cast<const uint32_t*>(row.number) + w);
      }
    }
    ptx::cp_async_commit_group();
  };
  const auto keep = [&](const auto& span) {
#pragma unroll
    for (int c = 0; c < Op::kConstants; ++c)
#pragma unroll
      for (int i = 0; i < NV; ++i)
        kept[i * Op::kConstants + c] = load_columns<T, V>(op.constant(c), span, i, op.absent(c));
  };

  int64_t base = team.index * teams;
  const auto later = [&](int64_t row, int n) -> int64_t {  // this team's row, n rows later
    if constexpr (kTakesFours<Op, V, scope, ragged>) {
      const int place = static_cast<int>(row & 3) + n;
      if (shape.fours) return row - (row & 3) + (place & 3) + (place & ~3) * step;
    }
    return row + n * step;
  };
  if (kTakesFours<Op, V, scope, ragged> && shape.fours) base *= 4;
  if constexpr (kAhead) {
    for (int s = 0; s < shape.stages; ++s) {
      fetch(later(base, s), s);
      if constexpr (ragged) stage(s).settle(odd);
    }
  }
  if constexpr (!ragged && Op::kConstants > 0) {
    if (threadIdx.y == 0) keep(span_at(op.row(0)));
    if constexpr (scope == Scope::warp) __syncthreads();
  }
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;
  int columns_kept = INT32_MIN;  // first column of the constants in the slots
  const auto put = [&](const typename Op::Row& row, F number, const auto& result, auto& held, const auto& span,
                       const auto& inputs) {
    if constexpr (Op::kNumber)
      op.write(row, result, held, span, inputs, constants, sums, number);
    else
      op.write(row, result, held, span, inputs, constants, sums);
  };
  const auto keep_ragged = [&](const auto& span) {
    if (!ragged || Op::kConstants == 0 || columns_kept == span.first) return;
    columns_kept = span.first;
    keep(span);
  };
#if __CUDA_ARCH__ >= 900
  // Clusters write a row after they have folded the next one; its merge completes meanwhile.
  if constexpr (scope == Scope::cluster && V > 1 && std::is_empty_v<typename Op::template Held<V, NV>>) {
    typename Op::template Held<V, NV> none;
    int64_t base_before = base;
    int slot = 0, slot_before = 0;
    const auto write = [&] {
      const auto result = op.finish(team.collect(op));
      const typename Op::Row row = row_at(base_before);
      const auto span = span_at(row);
      keep_ragged(span);
      put(row, Op::kNumber ? numbers[slot_before * threads] : F(0), result, none, span, stage(slot_before));
      fetch(base + (shape.stages - 1) * step, slot_before);
    };
    const int64_t begin = base;
#pragma unroll 1
    for (; shape.stages > 2 && base < shape.rows; base += step) {
      const typename Op::Row row = row_at(base);
      const auto span = span_at(row);
      keep_ragged(span);
      ptx::cp_async_wait_group(shape.stages - 2);
      if constexpr (ragged) stage(slot).settle(odd);
      typename Op::State state = Op::identity();
      op.fold(state, none, row, span, stage(slot), constants);
      team.publish(team.merge_block(op, state));
      if (base > begin) write();
      base_before = base;
      slot_before = slot;
      slot = slot + 1 < shape.stages ? slot + 1 : 0;
    }
    if (base > begin) write();
  }
#endif
#pragma unroll 1
  for (int s = 0; base < shape.rows; base = later(base, 1)) {
    const typename Op::Row row = row_at(base);
    const auto span = span_at(row);
    keep_ragged(span);
    F number = 0;
    const auto work = [&](auto& inputs) {
      typename Op::State state = Op::identity();
      typename Op::template Held<V, NV> held;
      op.fold(state, held, row, span, inputs, constants);
      const auto result = op.finish(team.merge(op, state));
      if constexpr (std::is_empty_v<decltype(held)> && !kShared) inputs.forget_numbers();
      if (scope != Scope::warp || base + row_in_block < shape.rows) put(row, number, result, held, span, inputs);
    };
    Stage ahead = stage(s);
    if constexpr (kAhead) {
      ptx::cp_async_wait_group(shape.stages - 1);
      if constexpr (ragged) ahead.settle(odd);
      if constexpr (Op::kNumber) number = numbers[s * threads];
    } else if constexpr (Op::kNumber) {
      number = *row.number;
    }
    if constexpr (kShared) {
      work(ahead);
      fetch(later(base, shape.stages), s);
    } else {
      Inputs<T, V, NV, K> inputs;
      if constexpr (kAhead) {
        ahead.take(inputs);
        fetch(later(base, shape.stages), s);
      } else {
        inputs.load(row, span, ptx::l2_policy(ragged || shape.large));
      }
      work(inputs);
    }
    s = s + 1 < shape.stages ? s + 1 : 0;
  }
  team.leave();
  if constexpr (Op::kColumnSums) {
    if constexpr (kAddsTeams<V, scope, ragged>) {
      ptx::cp_async_wait_group(0);
      add_teams(sums, reinterpret_cast<F*>(shared));
      if (threadIdx.y == 0) op.write_sums(team.index, span_at(op.row(0)), sums);
    } else {
      const int64_t mine = team.index * teams + row_in_block;
      op.write_sums(mine, span_at(op.row(mine < shape.rows ? mine : 0)), sums);
    }
  }
}

}  // namespace matmuls
