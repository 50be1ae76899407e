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
// do not end on 16 bytes, the vectors still do, and the first and the last of a row reach over its ends: what lies
// there is read, never used and never written.
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

// Columns of a row that is the same for all rows, a weight say; what lies outside is 0.
template <class T, int V, bool ragged>
__device__ Words<T, V> load_columns(const T* row, const Span<V, ragged>& span, int i) {
  Words<T, V> words{};
  const T* from = row + span.column(i);
  if constexpr (V > 1) {
    if (span.whole(i, span.columns) && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      load_constant<16>(from, words.at);
      return words;
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (!span.holds(i, j, span.columns)) continue;
    const Words<T, 1> one = load_once<T, 1>(from + j);
    if constexpr (sizeof(T) == 2) {
      words.at[j / 2] |= one.at[0] << (16 * (j % 2));
    } else {
#pragma unroll
      for (int w = 0; w < Words<T, 1>::kCount; ++w) words.at[j * Words<T, 1>::kCount + w] = one.at[w];
    }
  }
  return words;
}

// ----------------------------------------------------------------------------------------------------------- kernels

struct RowShape {
  int64_t rows;
  int columns;
  int walk;       // rows that a team walks at most
  int64_t group;  // neighbouring blocks whose teams take rows in turn: a team's rows are `group` blocks apart
};

// Op, for a storage type T and arithmetic type F:
//   kInputs, State, identity()          what is read, what a row is folded into
//   kVectors, kLongVectors              vectors of each input that a thread holds; in rows that leave no other choice
//   kThreadsPerSm                       how many threads an SM should have room for; half of them with kLongVectors
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
// inputs.at[i][k] are the words of vector i of input k; constants(c, i, numbers) gives those of constant c.

template <class T, int V, int NV, int K>
struct Inputs {
  Words<T, V> at[NV][K];

  template <class Row, bool ragged>
  __device__ void load(const Row& row, const Span<V, ragged>& span) {
    const int end = row.visible(span.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        at[i][k] = {};
        if (span.column(i) < end)
          at[i][k] = load_once<T, V>(row.input(k) + span.column(i) * (V == 1 ? row.column_stride(k) : 1));
      }
    }
  }
  // 16-bit numbers stay packed from fold to write: half the registers.
  __device__ void forget_numbers() {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int n = 0; n < NV * K * Words<T, V>::kCount; ++n)
        ptx::forget(at[n / K / Words<T, V>::kCount][n / Words<T, V>::kCount % K].at[n % Words<T, V>::kCount]);
    }
  }
};

// Two sums for each of a thread's columns, from row to row: in registers, or in slots of shared memory, 16 bytes of
// each thread side by side.
template <class F, int V, int NV, bool in_shared>
struct ColumnSums {
  static constexpr int kWide = std::min<int>(V, 16 / sizeof(F)), kPieces = V / kWide;
  static constexpr size_t kBytes = in_shared ? 2 * NV * V * sizeof(F) : 0;  // of shared memory for a thread
  struct alignas(kWide * sizeof(F)) Piece {
    F at[kWide];
  };
  Piece own[in_shared ? 1 : std::max(1, 2 * NV * kPieces)] = {};
  Piece* slots = nullptr;
  int step = 1;

  __device__ void start(unsigned char* shared, int threads, int thread) {
    if constexpr (in_shared) {
      slots = reinterpret_cast<Piece*>(shared) + thread;
      step = threads;
#pragma unroll 1
      for (int n = 0; n < 2 * NV * kPieces; ++n) slots[n * step] = {};
    }
  }
  __device__ Piece& piece(int s, int i, int p) {
    const int n = (s * NV + i) * kPieces + p;
    if constexpr (in_shared) return slots[n * step];
    return own[n];
  }
  __device__ void add(int s, int i, const F (&values)[V]) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      Piece sum = piece(s, i, p);
#pragma unroll
      for (int j = 0; j < kWide; ++j) sum.at[j] += values[p * kWide + j];
      piece(s, i, p) = sum;
    }
  }
  __device__ F get(int s, int i, int j) { return piece(s, i, j / kWide).at[j % kWide]; }
};

template <class Op, int V, bool ragged>
__device__ Span<V, ragged> span_of(const typename Op::Row& row, int first_vector, int step, int columns) {
  int shift = 0;
  if constexpr (ragged)
    shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.input(0)) % 16 / sizeof(typename Op::Storage));
  return {first_vector * V - shift, step * V, columns};
}

// Of a thread's shared memory: its columns of the constants.
template <class Op, int V, int NV>
constexpr size_t kConstantBytes = sizeof(Words<typename Op::Storage, V>) * Op::kConstants * NV;

// With kLongVectors the registers are full.
template <class Op, int NV, Scope scope>
constexpr bool sums_in_shared = Op::kColumnSums && scope == Scope::cluster && NV > Op::kVectors;

template <class Op, int V, int NV, Scope scope>
constexpr size_t kThreadBytes = kConstantBytes<Op, V, NV> + ColumnSums < typename Op::F,
                 V, Op::kColumnSums ? NV : 0, sums_in_shared < Op, NV, scope >> ::kBytes;

template <Scope scope>
constexpr int kBlockThreads = scope == Scope::warp ? 256 : kMaxThreads;

template <class Op, int V, int NV, Scope scope, bool ragged>
__global__ void __launch_bounds__(kBlockThreads<scope>,
                                  Op::kThreadsPerSm / (NV > Op::kVectors ? 2 : 1) / kBlockThreads<scope>)
    rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  // With so much in each thread's hands there are too few threads to hide the wait for a row: the next one is on its
  // way while this one is worked on, where registers allow.
  constexpr bool kAhead = (Op::kColumnSums || NV > Op::kVectors) && NV * Op::kInputs <= 8;
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0;
  const int64_t teams = scope == Scope::warp ? blockDim.y : 1;  // of a block
  const int64_t step = shape.group * teams;
  int64_t base = team.index / shape.group * step * shape.walk + team.index % shape.group * teams;

  // Each thread keeps its own columns of the constants in slots of shared memory that no other thread touches.
  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const auto slot = [&](int c, int i) -> Words<T, V>& {
    return reinterpret_cast<Words<T, V>*>(shared)[(i * Op::kConstants + c) * threads + thread];
  };
  int kept = INT32_MIN;  // the first column of what is there
  const auto keep = [&](const Span<V, ragged>& span) {
    if (Op::kConstants == 0 || kept == span.first) return;
    kept = span.first;
#pragma unroll
    for (int c = 0; c < Op::kConstants; ++c) {
      if (!op.constant(c)) continue;
#pragma unroll 1
      for (int i = 0; i < NV; ++i) slot(c, i) = load_columns<T, V>(op.constant(c), span, i);
    }
  };
  const auto constants = [&](int c, int i, F(&numbers)[V]) { unpack(slot(c, i), numbers); };

  // Several teams of a warp walk side by side; those past the last row go along with a row that is not theirs.
  const auto row_at = [&](int64_t first) { return op.row(first + beside < shape.rows ? first + beside : first); };
  const auto span_at = [&](const typename Op::Row& row) {
    return span_of<Op, V, ragged>(row, team.rank, team.size, shape.columns);
  };
  Inputs<T, V, NV, Op::kInputs> inputs, next;
  if (kAhead && base < shape.rows) {
    const auto row = row_at(base);
    next.load(row, span_at(row));
  }
  ColumnSums<F, V, Op::kColumnSums ? NV : 0, sums_in_shared<Op, NV, scope>> sums;
  sums.start(shared + kConstantBytes<Op, V, NV> * threads, threads, thread);
#pragma unroll 1
  for (int w = 0; w < shape.walk && base < shape.rows; ++w, base += step) {
    const typename Op::Row row = row_at(base);
    const auto span = span_at(row);
    if constexpr (kAhead) {
      inputs = next;
      if (w + 1 < shape.walk && base + step < shape.rows) {
        const auto row_ahead = row_at(base + step);
        next.load(row_ahead, span_at(row_ahead));
      }
    } else {
      inputs.load(row, span);
    }
    keep(span);
    typename Op::State state = Op::identity();
    typename Op::template Held<V, NV> held;
    op.fold(state, held, row, span, inputs, constants);
    const auto result = op.finish(team.merge(op, state));
    if constexpr (std::is_empty_v<decltype(held)>) inputs.forget_numbers();
    if (scope == Scope::warp && base + beside >= shape.rows) continue;
    op.write(row, result, held, span, inputs, constants, sums);
  }
  team.leave();
  if constexpr (Op::kColumnSums) {
    const int64_t mine = team.index * teams + beside;
    op.write_sums(mine, span_at(op.row(mine < shape.rows ? mine : 0)), sums);
  }
}

// A block for each row, whatever its length: one pass to fold it, one to write it.
template <class Op, int V, int NV, bool ragged>
__global__ void __launch_bounds__(kMaxThreads) long_rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  Team<Scope::block> team;
  ColumnSums<F, V, Op::kColumnSums ? NV : 0, false> sums;  // taken by another kernel
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

struct RowConfig {
  bool held;
  Scope scope;
  int vectors;  // that a thread holds
  int threads;  // of a block, for one row
  int beside;   // rows that a block works on side by side
  int ranks;    // blocks of a cluster
};

// The kernels for short rows hold 1, 2, 3, 4, 6 or `most` vectors a thread.
constexpr int compiled_vectors(int vectors, int most) {
  for (const int held : {1, 2, 3, 4, 6})
    if (vectors <= held && held < most) return held;
  return most;
}

// How a row is shared out. Few threads that hold much each need the fewest instructions a column.
inline RowConfig configure(int64_t vectors, bool clusters, int most, int most_if_long) {
  const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  const auto power = [](int64_t x) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(x))); };
  const int64_t threads = up(up(vectors, most), 32) * 32;
  if (threads == 32) {
    // Up to 8 lanes share even a row that fewer could hold: their accesses lie side by side.
    const int lanes = std::max(power(up(vectors, most)), std::min(8, power(up(vectors, 2))));
    return {true, Scope::warp, compiled_vectors(static_cast<int>(up(vectors, lanes)), most), lanes, 256 / lanes, 1};
  }
  if (threads <= kMaxThreads) return {true, Scope::block, most, static_cast<int>(threads), 1, 1};
  clusters &= at::cuda::getCurrentDeviceProperties()->major >= 9;
  for (const int held : {most, most_if_long}) {
    const int64_t all = up(vectors, held);
    if (!clusters || all > kMaxRanks * kMaxThreads) continue;
    const int ranks = std::clamp(power(up(all, 256)), 2, kMaxRanks);
    return {true, Scope::cluster, held, static_cast<int>(up(up(all, ranks), 32) * 32), 1, ranks};
  }
  return {false, Scope::block, most, 256, 1, 1};
}

// Shared memory above 48 KiB and clusters of more than 8 blocks are asked for once per kernel and device.
template <auto kernel>
void permit(int device) {
  static std::atomic<uint64_t> done{0};
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (done.load(std::memory_order_relaxed) & bit) return;
  const auto* properties = at::cuda::getDeviceProperties(device);
  cudaFuncAttributes attributes;
  C10_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(properties->sharedMemPerBlockOptin - attributes.sharedSizeBytes)));
  if (properties->major >= 9)
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  done.fetch_or(bit, std::memory_order_relaxed);
}

// prepare(op, teams) is called before the launch; `stay`: whether the columns of a thread can stay the same from row to
// row, with teams a multiple of V.
template <class Op, int V, int NV, Scope scope, bool ragged, class Prepare>
void launch_held(Op op, const RowConfig& c, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr auto kernel = rows_kernel<Op, V, NV, scope, ragged>;
  permit<kernel>(c10::cuda::current_device());
  const int64_t sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const int64_t at_once = std::max<int64_t>(1, sms * Op::kThreadsPerSm / (c.threads * c.beside * c.ranks));
  const int64_t needed = (rows + c.beside - 1) / c.beside;  // blocks or clusters, each for one row a team
  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(c.threads, c.beside);
  launch.dynamicSmemBytes = kThreadBytes<Op, V, NV, scope> * c.threads * c.beside;
  launch.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute cluster{};
  if constexpr (scope == Scope::cluster) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(c.ranks), 1, 1};
    launch.attrs = &cluster;
    launch.numAttrs = 1;
  }
  RowShape shape{rows, static_cast<int>(columns), 1, 1};
  int64_t blocks = needed;
  if constexpr (Op::kColumnSums) {  // as few teams as fill the device: each leaves sums behind
    blocks = at_once;
    if constexpr (scope == Scope::cluster) {
      int fit = 0;
      launch.gridDim = dim3(c.ranks);
      C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch));
      blocks = std::min<int64_t>(blocks, std::max(fit, 1));
    }
    if (ragged && c.beside < V && blocks > V) blocks -= blocks % V;
    blocks = std::min(blocks, needed);
    shape.group = blocks;
    shape.walk = static_cast<int>((needed + blocks - 1) / blocks);
  } else if (Op::kConstants > 0) {  // loaded once for up to 16 rows, while there is work for 8 such rounds
    shape.walk = static_cast<int>(std::clamp<int64_t>(needed / (8 * at_once), 1, 16));
    if (ragged) shape.group = std::max(1, V / c.beside);
    const int64_t rounds = shape.group * shape.walk;
    blocks = (needed + rounds - 1) / rounds * shape.group;
  }
  launch.gridDim = dim3(static_cast<unsigned>(blocks * c.ranks));
  prepare(op, blocks * c.beside);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, op, shape));
}

template <class Op, int V, int NV, bool ragged>
void launch_long(const Op& op, int threads, int64_t rows, int64_t columns) {
  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(threads);
  launch.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(rows, INT32_MAX)));
  launch.stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, long_rows_kernel<Op, V, NV, ragged>, op,
                                    RowShape{rows, static_cast<int>(columns), 1, 1}));
}

template <int V, bool ragged, class Op, class Prepare>
void launch_vectors(const Op& op, int64_t rows, int64_t columns, const Prepare& prepare) {
  constexpr int kMost = V == 1 ? 4 : Op::kVectors;
  const int64_t vectors = (columns + V - 1) / V + (ragged ? 1 : 0);
  RowConfig c = configure(vectors, V > 1, kMost, Op::kLongVectors);
  if (ragged || V == 1) c.vectors = std::max(c.vectors, kMost);  // one kernel for all short rows
  const auto go = [&]<int NV, Scope scope>() {
    const size_t most = at::cuda::getCurrentDeviceProperties()->sharedMemPerBlockOptin - 2048;  // the merge's own
    if (c.held && kThreadBytes<Op, V, NV, scope> * c.threads * c.beside <= most)
      launch_held<Op, V, NV, scope, ragged>(op, c, rows, columns, prepare);
    else
      launch_long<Op, V, kMost, ragged>(op, 256, rows, columns);
  };
  if (c.scope == Scope::block) return go.template operator()<kMost, Scope::block>();
  if constexpr (V > 1) {
    if (c.scope == Scope::cluster && c.vectors > kMost)
      return go.template operator()<Op::kLongVectors, Scope::cluster>();
    if (c.scope == Scope::cluster) return go.template operator()<kMost, Scope::cluster>();
    const auto warps = [&]<int NV>() { go.template operator()<compiled_vectors(NV, kMost), Scope::warp>(); };
    if constexpr (!ragged) {
      switch (c.vectors) {
        case 1: return warps.template operator()<1>();
        case 2: return warps.template operator()<2>();
        case 3: return warps.template operator()<3>();
        case 4: return warps.template operator()<4>();
        case 6: return warps.template operator()<6>();
      }
    }
  }
  go.template operator()<kMost, Scope::warp>();
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
