// Rows on the GPU: the one kernel behind softmax, the norms and their gradients.
//
// A team of threads owns a row. Each thread loads its part of the row by 16-byte vectors, folds it into a small state,
// the states are merged, and the thread writes its part of the result: one read and one write of memory. Many small
// blocks hide the waits; there is little code, for the instruction cache. A row too long to be held passes by twice.
//
// An operation is a struct: what to fold, how states merge, what to write (softmax_backward.cu is the plainest).
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <ATen/cuda/detail/IntegerDivider.cuh>

#include <algorithm>
#include <atomic>
#include <bit>

#include "row_team.cuh"
#include "rows.h"

namespace matmuls {

// -------------------------------------------------------------------------------------------------- where rows start

template <int N>
struct RowIndex {
  explicit RowIndex(const Rows<N>& rows) : dims(rows.dims), wide(rows.count > INT32_MAX) {
    for (int d = 0; d < dims; ++d) {
      sizes[d] = rows.sizes[d];
      if (!wide) dividers[d] = at::cuda::detail::IntDivider<uint32_t>(static_cast<uint32_t>(rows.sizes[d]));
      for (int t = 0; t < N; ++t) strides[t][d] = rows.strides[t][d];
    }
  }

  // Offsets of a row's first element in every tensor.
  struct Offsets {
    int64_t at[N];
  };
  __device__ Offsets operator()(int64_t row) const {
    Offsets offsets;
    if (dims <= 1) {
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] = row * strides[t][0];
      return offsets;
    }
    if (wide) return divided(row);
#pragma unroll
    for (int t = 0; t < N; ++t) offsets.at[t] = 0;
    uint32_t rest = static_cast<uint32_t>(row);
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const uint32_t next = d + 1 < dims ? dividers[d].div(rest) : 0;
      const uint32_t index = rest - next * static_cast<uint32_t>(sizes[d]);
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] += index * strides[t][d];
      rest = next;
    }
    return offsets;
  }

  int dims;
  bool wide;
  at::cuda::detail::IntDivider<uint32_t> dividers[Rows<N>::kMaxDims];
  int64_t sizes[Rows<N>::kMaxDims] = {};
  int64_t strides[N][Rows<N>::kMaxDims] = {};

 private:
  // More than 2^31 rows.
  __device__ __noinline__ Offsets divided(int64_t row) const {
    Offsets offsets{};
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      const int64_t rest = d + 1 < dims ? row / sizes[d] : 0;
      const int64_t index = row - rest * sizes[d];
#pragma unroll
      for (int t = 0; t < N; ++t) offsets.at[t] += index * strides[t][d];
      row = rest;
    }
    return offsets;
  }
};

// ------------------------------------------------------------------------------------------------- a thread's columns

// The part of a row in one thread's hands: vectors of V neighbouring columns. In `ragged` rows, which do not start or
// do not end on 16 bytes, the vectors still do, and the first and the last of a row reach over its ends: of those the
// row's own columns alone are read and written.
template <int V, bool ragged>
struct Span {
  int first, step;  // column of the first vector's first element, and the way to the next vector
  int columns;      // that the row has

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return column(i) < columns; }
  __device__ bool whole(int i, int end) const { return (!ragged || column(i) >= 0) && column(i) + V <= end; }
  __device__ bool holds(int i, int j, int end) const {
    return static_cast<unsigned>(column(i) + j) < static_cast<unsigned>(end);
  }
  // How many of the row's columns vector i has.
  __device__ int count(int i) const {
    if constexpr (ragged) return max(0, min(column(i) + V, columns) - max(column(i), 0));
    return begins(i) ? V : 0;
  }

  // `fill` instead of what vector i has beside columns 0 to end.
  template <class F>
  __device__ void clear_outside(int i, int end, F fill, F (&values)[V]) const {
    if (whole(i, end)) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (!holds(i, j, end)) values[j] = fill;
  }

  template <class T, class F>
  __device__ void store(T* row, int64_t column_stride, int i, const F (&values)[V]) const {
    if constexpr (V == 1) {
      if (begins(i)) row[column(i) * column_stride] = T(values[0]);
    } else if (whole(i, columns)) {
      store_once(row + column(i), pack<T, V>(values));
    } else if constexpr (ragged) {
#pragma unroll
      for (int j = 0; j < V; ++j)
        if (holds(i, j, columns)) row[column(i) + j] = T(values[j]);
    }
  }
};

// A vector that reaches over an end of the row: 0 in columns that the row does not have.
template <class T, int V>
__device__ Words<T, V> load_edge(const T* row, int column, int columns) {
  Words<T, V> words{};
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (static_cast<unsigned>(column + j) >= static_cast<unsigned>(columns)) continue;
    const T* const from = row + column + j;
    if constexpr (sizeof(T) == 2) {
      words.at[j / 2] |= static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from)) << 16 * (j % 2);
    } else {
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(T) / 4); ++w)
        words.at[j * sizeof(T) / 4 + w] = reinterpret_cast<const uint32_t*>(from)[w];
    }
  }
  return words;
}

// The 16 bytes at any address, of the two aligned 16 bytes around it.
__device__ inline uint4 across_aligned(uintptr_t from) {
  const uint4* const low = reinterpret_cast<const uint4*>(from & ~uintptr_t{15});
  const uint4 w[2] = {__ldg(low), __ldg(low + 1)};
  const unsigned bytes = from % 16;
  uint32_t at[8] = {w[0].x, w[0].y, w[0].z, w[0].w, w[1].x, w[1].y, w[1].z, w[1].w};
#pragma unroll
  for (int n = 0; n < 6; ++n) at[n] = bytes & 8 ? at[n + 2] : at[n];
#pragma unroll
  for (int n = 0; n < 5; ++n) at[n] = bytes & 4 ? at[n + 1] : at[n];
  const unsigned bits = 8 * (bytes % 4);
  return {__funnelshift_r(at[0], at[1], bits), __funnelshift_r(at[1], at[2], bits), __funnelshift_r(at[2], at[3], bits),
          __funnelshift_r(at[3], at[4], bits)};
}

// Columns of a row that is the same for all rows, a weight say, where the vector does not start on 16 bytes or reaches
// over an end.
template <class T, int V>
__device__ Words<T, V> load_unaligned(const T* row, int column, int columns) {
  const auto from = reinterpret_cast<uintptr_t>(row + column), low = from & ~uintptr_t{15};
  const auto begin = reinterpret_cast<uintptr_t>(row), end = reinterpret_cast<uintptr_t>(row + columns);
  if (low < begin || low + 32 > end) return load_edge<T, V>(row, column, columns);
  const uint4 w = across_aligned(from);
  return {w.x, w.y, w.z, w.w};
}
// Out of line for rows where a weight that starts elsewhere is rare: their code stays short.
template <class T, int V>
__device__ __noinline__ Words<T, V> load_unaligned_rarely(const T* row, int column, int columns) {
  return load_unaligned<T, V>(row, column, columns);
}

// Columns of a row that is the same for all rows; 0 beside them.
template <class T, int V, bool ragged>
__device__ Words<T, V> load_columns(const T* row, const Span<V, ragged>& span, int i) {
  if (!span.begins(i)) return {};
  const T* const from = row + span.column(i);
  if constexpr (V == 1) {
    return load_once<T, 1>(from);
  } else if constexpr (ragged) {
    return load_unaligned<T, V>(row, span.column(i), span.columns);
  } else {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
      return load_unaligned_rarely<T, V>(row, span.column(i), span.columns);
    const uint4 w = __ldg(reinterpret_cast<const uint4*>(from));
    return {w.x, w.y, w.z, w.w};
  }
}

// ------------------------------------------------------------------------------------------------ what a thread holds

// Its vectors of a row: words(i, k) are those of vector i of input k. In registers: 16-bit numbers stay packed.
template <class T, int V, int NV, int K>
struct Inputs {
  Words<T, V> at[NV][K];

  __device__ const Words<T, V>& words(int i, int k) const { return at[i][k]; }

  template <class Row, bool ragged>
  __device__ void load(const Row& row, const Span<V, ragged>& span) {
    const int end = row.visible(span.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        at[i][k] = {};
        if (span.column(i) >= end) continue;
        if (!ragged || span.whole(i, span.columns))
          at[i][k] = load_once<T, V>(row.input(k) + span.column(i) * (V == 1 ? row.column_stride(k) : 1));
        else
          at[i][k] = load_edge<T, V>(row.input(k), span.column(i), span.columns);
      }
    }
  }
  // The same numbers are unpacked again rather than kept from fold to write: half the registers.
  __device__ void forget_numbers() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int n = 0; n < NV * K * Words<T, V>::kCount; ++n)
        ptx::forget(at[n / K / Words<T, V>::kCount][n / Words<T, V>::kCount % K].at[n % Words<T, V>::kCount]);
    }
  }
};

// Slots of shared memory, a vector each, that one thread alone uses: those of neighbours lie side by side.
template <class T, int V>
struct Slots {
  Words<T, V>* first;
  int step;
  __device__ Words<T, V>& operator[](int n) const { return first[n * step]; }
};

// A row on its way to shared memory while the one before is worked on.
template <class T, int V, int NV, int K>
struct Ahead {
  Slots<T, V> slots;

  __device__ const Words<T, V>& words(int i, int k) const { return slots[i * K + k]; }

  template <class Row, bool ragged>
  __device__ void fetch(const Row& row, const Span<V, ragged>& span) const {
    const int end = row.visible(span.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (span.column(i) >= end) continue;
        if (!ragged || span.whole(i, span.columns))
          ptx::copy_ahead(&slots[i * K + k], row.input(k) + span.column(i));
        else
          slots[i * K + k] = load_edge<T, V>(row.input(k), span.column(i), span.columns);
      }
  }
  // What came, into registers; the slots are free again.
  __device__ void take(Inputs<T, V, NV, K>& inputs) const {
#pragma unroll
    for (int i = 0; i < NV; ++i)
#pragma unroll
      for (int k = 0; k < K; ++k) inputs.at[i][k] = slots[i * K + k];
  }
};

// Two sums for each of a thread's columns, from row to row.
template <class F, int V, int NV>
struct ColumnSums {
  F at[2][std::max(NV, 1)][V] = {};
  __device__ void add(int s, int i, const F (&values)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) at[s][i][j] += values[j];
  }
};

template <class Op, int V, bool ragged>
__device__ Span<V, ragged> span_of(const typename Op::Row& row, int first_vector, int step, int columns) {
  int shift = 0;
  if constexpr (ragged)
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.input(0)) % 16 / sizeof(typename Op::Storage));
  return {first_vector * V - shift, step * V, columns};
}

// ----------------------------------------------------------------------------------------------------------- kernels

struct RowShape {
  int64_t rows;
  int columns;
};

// Op, for a storage type T and arithmetic type F:
//   kInputs, State, identity()          what is read, what a row is folded into
//   kVectors, kLongVectors              vectors of each input that a thread holds; in rows that leave no other choice
//   kThreadsPerSm                       how many threads an SM should have room for
//   Row row(r)                          row r: `input(k)`, and how many columns are worth reading
//   kWholeRows                          whether it is for rows of whole, aligned vectors alone
//   kConstants, constant(c)             rows of T that are the same for all rows, or null: a weight, a bias
//   Held<V, NV>                         what fold leaves for write, in registers
//   fold(state, held, row, span, inputs, constants)  the state with a span more
//   merge(state, lanes)                 the states of all lanes as one
//   finish(state)                       what write takes
//   write(row, result, held, span, inputs, constants, sums)
//   kColumnSums                         whether write adds to `sums`, two for each of a thread's columns
//   write_sums(team, span, sums)        those of all rows; only where a thread's columns stay the same
// inputs.words(i, k) are vector i of input k; constants(c, i, numbers) gives those of constant c.

// A row for each team, and no more: where a row is in few hands many of them wait for memory at once.
template <Scope scope>
constexpr int kRowThreads = scope == Scope::warp ? 64 : 512;  // of a block at most

template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(kRowThreads<scope>, Op::kThreadsPerSm / kRowThreads<scope>)
    row_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t first = team.index * (scope == Scope::warp ? blockDim.y : 1);
  // Several teams of a warp go along; those past the last row with a row that is not theirs.
  const bool own = first + beside < shape.rows;
  const typename Op::Row row = op.row(own ? first + beside : first);
  const auto span = span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  const auto constants = [&](int c, int i, typename Op::F(&numbers)[V]) {
    unpack(load_columns<T, V>(op.constant(c), span, i), numbers);
  };
  Inputs<T, V, NV, Op::kInputs> inputs;
  inputs.load(row, span);
  typename Op::State state = Op::identity();
  typename Op::template Held<V, NV> held;
  op.fold(state, held, row, span, inputs, constants);
  const auto result = op.finish(team.merge(op, state));
  if constexpr (std::is_empty_v<decltype(held)>) inputs.forget_numbers();
  ColumnSums<typename Op::F, V, 0> none;
  if (own) op.write(row, result, held, span, inputs, constants, none);
}

// Sums go from row to row; the constants of ragged rows are put in place once for all rows.
template <class Op, bool ragged>
constexpr bool kWalks = Op::kColumnSums || (ragged && Op::kConstants > 0);

// Of a thread's shared memory: its columns of the constants, and of the next row.
template <class Op, int V, int NV>
constexpr size_t kThreadBytes =
    sizeof(Words<typename Op::Storage, V>) * NV * (Op::kConstants + (V > 1 ? Op::kInputs : 0));

// The registers do not hold so much beside the sums: it stays in shared memory.
template <class Op, int V, int NV>
constexpr bool kStaysShared = V > 1 && NV > Op::kVectors;

template <Scope scope>
constexpr int kWalkThreads = scope == Scope::warp    ? 256
                             : scope == Scope::block ? 512
                                                     : 1024;  // of a block at most

// As many teams as run at once walk over the rows, each with the next row on its way: where a row needs so many threads
// that few rows fit an SM, or sums go from row to row.
template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(std::min(kWalkThreads<scope>, Op::kMostThreads),
                                  std::max(1, Op::kThreadsPerSm / kWalkThreads<scope>))
    walking_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  constexpr bool kAhead = V > 1, kShared = kStaysShared<Op, V, NV>;
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t teams = scope == Scope::warp ? blockDim.y : 1;  // of a block
  const int64_t step = team.count() * teams;

  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  Words<T, V>* const slots = reinterpret_cast<Words<T, V>*>(shared) + thread;
  const Slots<T, V> kept{slots, threads};
  const Ahead<T, V, NV, Op::kInputs> ahead{{slots + NV * Op::kConstants * threads, threads}};
  const auto constants = [&](int c, int i, F(&numbers)[V]) { unpack(kept[i * Op::kConstants + c], numbers); };

  const auto row_at = [&](int64_t first) { return op.row(first + beside < shape.rows ? first + beside : first); };
  const auto span_at = [&](const typename Op::Row& row) {
    return span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  };
  const auto fetch = [&](int64_t first) {
    if constexpr (kAhead) {
      if (first >= shape.rows) return;
      const typename Op::Row row = row_at(first);
      ahead.fetch(row, span_at(row));
    }
  };
  int64_t base = team.index * teams;
  fetch(base);
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;
  int columns_kept = INT32_MIN;  // the first column of the constants in the slots
#pragma unroll 1
  for (; base < shape.rows; base += step) {
    const typename Op::Row row = row_at(base);
    const auto span = span_at(row);
    if (Op::kConstants > 0 && columns_kept != span.first) {
      columns_kept = span.first;
#pragma unroll
      for (int c = 0; c < Op::kConstants; ++c) {
        if (!op.constant(c)) continue;
#pragma unroll
        for (int i = 0; i < NV; ++i) kept[i * Op::kConstants + c] = load_columns<T, V>(op.constant(c), span, i);
      }
    }
    const auto work = [&](auto& inputs) {
      typename Op::State state = Op::identity();
      typename Op::template Held<V, NV> held;
      op.fold(state, held, row, span, inputs, constants);
      const auto result = op.finish(team.merge(op, state));
      if constexpr (std::is_empty_v<decltype(held)> && !kShared) inputs.forget_numbers();
      if (scope != Scope::warp || base + beside < shape.rows)
        op.write(row, result, held, span, inputs, constants, sums);
    };
    if constexpr (kAhead) ptx::wait_ahead();
    if constexpr (kShared) {
      work(ahead);
      fetch(base + step);
    } else {
      Inputs<T, V, NV, Op::kInputs> inputs;
      if constexpr (kAhead)
        ahead.take(inputs);
      else
        inputs.load(row, span);
      fetch(base + step);
      work(inputs);
    }
  }
  team.leave();
  if constexpr (Op::kColumnSums) {
    const int64_t mine = team.index * teams + beside;
    op.write_sums(mine, span_at(op.row(mine < shape.rows ? mine : 0)), sums);
  }
}

// A block for each row, whatever its length: one pass to fold it, one to write it.
template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(512) long_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  Team<Scope::block> team;
  ColumnSums<F, V, Op::kColumnSums ? NV : 0> sums;  // taken by another kernel
#pragma unroll 1
  for (int64_t r = blockIdx.x; r < shape.rows; r += gridDim.x) {
    const typename Op::Row row = op.row(r);
    const auto pass = [&](typename Op::State& state, const auto& body) {
#pragma unroll 1
      for (int vector = team.rank; vector * V < shape.columns + (ragged ? V : 0); vector += NV * team.size) {
        const auto span = span_of<Op, V, ragged>(row, vector, team.size, shape.columns);
        const auto constants = [&](int c, int i, F(&numbers)[V]) {
          unpack(load_columns<T, V>(op.constant(c), span, i), numbers);
        };
        Inputs<T, V, NV, Op::kInputs> inputs;
        inputs.load(row, span);
        typename Op::template Held<V, NV> held;
        op.fold(state, held, row, span, inputs, constants);
        body(held, span, inputs, constants);
      }
    };
    typename Op::State state = Op::identity();
    pass(state, [](auto&&...) {});
    const auto result = op.finish(team.merge(op, state));
    typename Op::State again = Op::identity();
    pass(again, [&](auto& held, const auto& span, const auto& inputs, const auto& constants) {
      op.write(row, result, held, span, inputs, constants, sums);
      again = Op::identity();
    });
  }
}

// ----------------------------------------------------------------------------------------------------------- launch

enum class Way { row, walk, passes };
struct RowConfig {
  Way way;
  Scope scope;
  int vectors;  // that a thread holds
  int threads;  // of a block, for one row
  int beside;   // rows that a block works on side by side
  int ranks;    // blocks of a cluster
};

// The kernels for short rows hold 1, 2, 3 or `most` vectors a thread.
constexpr int compiled_vectors(int vectors, int most) {
  for (const int held : {1, 2, 3})
    if (vectors <= held && held < most) return held;
  return most;
}

// How a row is shared out. Few threads that hold much each need the fewest instructions a column.
template <class Op, int V, bool ragged>
RowConfig configure(int64_t vectors) {
  const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  const auto power = [](int64_t x) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(x))); };
  constexpr int most = V == 1 ? 4 : Op::kVectors;
  constexpr bool walks = kWalks<Op, ragged>;
  const int64_t threads = up(up(vectors, most), 32) * 32;
  if (threads == 32) {
    // At least 4 lanes share a row, if it has 4 vectors: 64 bytes side by side.
    const int lanes = std::max(power(up(vectors, most)), std::min(4, power(vectors)));
    const int held = compiled_vectors(static_cast<int>(up(vectors, lanes)), most);
    return {walks ? Way::walk : Way::row, Scope::warp, held, lanes, (walks ? 256 : 64) / lanes, 1};
  }
  // With two constants, keeping them pays from 320 threads on.
  const bool keeps = V > 1 && Op::kConstants == 2 && threads > 320;
  if (threads <= 512)
    return {walks || keeps ? Way::walk : Way::row, Scope::block, most, static_cast<int>(threads), 1, 1};
  if (V > 1 && at::cuda::getCurrentDeviceProperties()->major >= 9) {
    for (const int held : {most, Op::kLongVectors}) {
      const int64_t all = up(vectors, held);
      if (all > kMaxRanks * Op::kMostThreads) continue;
      const int ranks = std::clamp(power(up(all, Op::kMostThreads)), 2, kMaxRanks);
      return {Way::walk, Scope::cluster, held, static_cast<int>(up(up(all, ranks), 32) * 32), 1, ranks};
    }
  }
  return {Way::passes, Scope::block, most, 256, 1, 1};
}

// How many blocks or clusters of a walking kernel run at once; asked once for a size, device and kernel.
template <auto kernel>
int resident(const cudaLaunchConfig_t& launch, int ranks) {
  const int device = c10::cuda::current_device();
  const auto key =
      (static_cast<uint64_t>(device + 1) << 32 | launch.blockDim.x << 8 | static_cast<unsigned>(ranks)) & 0xffffffffff;
  static std::atomic<uint64_t> known{0};  // the last key and its answer
  const uint64_t last = known.load(std::memory_order_relaxed);
  if (last >> 24 == key) return static_cast<int>(last & 0xffffff);
  int fit = 0;
  const auto* properties = at::cuda::getDeviceProperties(device);
  // Shared memory above 48 KiB and clusters of more than 8 blocks must be asked for.
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(properties->sharedMemPerBlockOptin - attributes.sharedSizeBytes)));
  if (ranks > 1) {
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch));
  } else {
    C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &fit, kernel, static_cast<int>(launch.blockDim.x * launch.blockDim.y), launch.dynamicSmemBytes));
    fit *= properties->multiProcessorCount;
  }
  fit = std::max(fit, 1);
  known.store(key << 24 | static_cast<unsigned>(fit), std::memory_order_relaxed);
  return fit;
}

// prepare(op, teams) is called before the launch of an operation with column sums.
template <class Op, int V, int NV, Scope scope, bool ragged, class Prepare>
void launch_walking(Op op, const RowConfig& c, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr auto kernel = walking_kernel<Op, V, NV, scope, ragged>;
  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(c.threads, c.beside);
  launch.dynamicSmemBytes = kThreadBytes<Op, V, NV> * c.threads * c.beside;
  launch.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute cluster{};
  if constexpr (scope == Scope::cluster) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(c.ranks), 1, 1};
    launch.attrs = &cluster;
    launch.numAttrs = 1;
  }
  launch.gridDim = dim3(c.ranks);
  const int64_t needed = (rows + c.beside - 1) / c.beside;  // blocks or clusters, each for one row a team
  int64_t blocks = resident<kernel>(launch, c.ranks);
  // A team's rows are then all as far from a multiple of 16 bytes, and its columns stay the same.
  if (ragged && c.beside < V && blocks > V) blocks -= blocks % V;
  blocks = std::min(blocks, needed);
  launch.gridDim = dim3(static_cast<unsigned>(blocks * c.ranks));
  prepare(op, blocks * c.beside);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, op, RowShape{rows, static_cast<int>(columns)}));
}

template <auto kernel, class Op>
void launch_rows_kernel(const Op& op, dim3 threads, int64_t blocks, int64_t rows, int64_t columns) {
  cudaLaunchConfig_t launch{};
  launch.blockDim = threads;
  launch.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, INT32_MAX)));
  launch.stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, op, RowShape{rows, static_cast<int>(columns)}));
}

template <int V, bool ragged, class Op, class Prepare>
void launch_vectors(const Op& op, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr int kMost = V == 1 ? 4 : Op::kVectors;
  const int64_t vectors = (columns + V - 1) / V + (ragged ? 1 : 0);
  const RowConfig c = configure<Op, V, ragged>(vectors);
  const auto go = [&]<int NV, Scope scope>() {
    if constexpr (scope != Scope::cluster && !kWalks<Op, ragged>) {
      if (c.way == Way::row)
        return launch_rows_kernel<row_kernel<Op, V, NV, scope, ragged>>(
            op, dim3(c.threads, c.beside), (rows + c.beside - 1) / c.beside, rows, columns);
    }
    if constexpr (scope != Scope::warp || kWalks<Op, ragged>) {
      const size_t most = at::cuda::getCurrentDeviceProperties()->sharedMemPerBlockOptin - 4096;  // the merge's own
      if (c.way == Way::walk && kThreadBytes<Op, V, NV> * c.threads * c.beside <= most)
        return launch_walking<Op, V, NV, scope, ragged>(op, c, rows, columns, prepare);
    }
    launch_rows_kernel<long_rows_kernel<Op, V, kMost, ragged>>(op, dim3(256), rows, rows, columns);
  };
  if (c.scope == Scope::block) return go.template operator()<kMost, Scope::block>();
  if constexpr (V > 1) {
    if (c.scope == Scope::cluster && c.vectors > kMost)
      return go.template operator()<Op::kLongVectors, Scope::cluster>();
    if (c.scope == Scope::cluster) return go.template operator()<kMost, Scope::cluster>();
    if constexpr (!ragged) {
      const auto warps = [&]<int NV>() { go.template operator()<compiled_vectors(NV, kMost), Scope::warp>(); };
      switch (c.vectors) {
        case 1: return warps.template operator()<1>();
        case 2: return warps.template operator()<2>();
        case 3: return warps.template operator()<3>();
      }
    }
  }
  go.template operator()<kMost, Scope::warp>();  // ragged: one kernel for all short rows
}

// Whether 16-byte vectors serve the first P tensors of a row: columns side by side, and every row at the same distance
// from a multiple of 16 in all of them. `aligned`: that distance is 0; `whole`: and vectors fill the row.
struct Alignment {
  bool vectors, aligned, whole;
};
template <class T, int N, size_t P>
Alignment alignment_of(const Rows<N>& rows, const std::array<const void*, P>& pointers) {
  const auto off = [&](int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)) % 16 != 0; };
  const auto address = [&](int t) { return reinterpret_cast<intptr_t>(pointers[t]); };
  bool vectors = true, aligned = address(0) % 16 == 0;
  for (size_t t = 0; t < P; ++t) {
    vectors &= rows.column_strides[t] == 1 && (address(t) - address(0)) % 16 == 0;
    for (int d = 0; d < rows.dims; ++d) {
      vectors &= !off(rows.strides[t][d] - rows.strides[0][d]);
      aligned &= !off(rows.strides[0][d]);
    }
  }
  return {vectors, vectors && aligned, vectors && aligned && !off(rows.columns)};
}

// Runs an operation over its rows. pointers: the tensors that are read or written by vectors; prepare(op, teams) is
// called before the launch of an operation with column sums, where a team's columns stay from row to row.
constexpr auto kNothingToPrepare = [](auto&&...) {};
template <class Op, int N, size_t P, class Prepare = decltype(kNothingToPrepare)>
void launch_rows(const Op& op, const Rows<N>& rows, const std::array<const void*, P>& pointers,
                 const Prepare& prepare = kNothingToPrepare) {
  using T = typename Op::Storage;
  constexpr int V = 16 / sizeof(T);
  TORCH_CHECK(rows.columns < INT32_MAX - 4096, "expected rows of fewer than 2^31 columns, got ", rows.columns);
  const auto a = alignment_of<T>(rows, pointers);
  if (a.whole || Op::kWholeRows) return launch_vectors<V, false>(op, rows.count, rows.columns, prepare);
  if constexpr (!Op::kWholeRows) {
    if (!a.vectors) return launch_vectors<1, false>(op, rows.count, rows.columns, prepare);
    launch_vectors<V, true>(op, rows.count, rows.columns, [&](Op& o, int64_t teams) {
      if (a.aligned || (rows.dims <= 1 && (teams % V == 0 || teams >= rows.count))) prepare(o, teams);
    });
  }
}

}  // namespace matmuls
