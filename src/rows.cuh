// Rows on the GPU: the one kernel behind softmax, the norms and their gradients.
//
// A team of threads owns a row: some lanes of a warp, a block, or a cluster of blocks. Each thread holds its part of
// the row in registers, folds it into a small state, the states are merged, and the thread writes its part of the
// result: one read and one write of memory. The rows to come are on their way meanwhile: cp.async brings them into
// 16-byte slots of shared memory, each of which the thread that reads it has filled itself, so that no barrier is
// needed but those of the merge. A row too long to be held passes by twice.
//
// An operation is a struct: what to fold, how states merge, what to write (softmax_backward.cu is the plainest).
#pragma once

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cooperative_groups.h>
#include <ATen/cuda/detail/IntegerDivider.cuh>

#include <algorithm>
#include <atomic>
#include <bit>

#include "device.cuh"
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

// ------------------------------------------------------------------------------------------------- teams of threads

enum class Scope { warp, block, cluster };

constexpr int kMaxThreads = 512;  // of a block: 128 registers each
constexpr int kMaxRanks = 16;     // blocks of a cluster; more than 8 need the device's permission

// Sums and maxima over `lanes` neighbours, a power of two.
struct Lanes {
  int lanes;
  template <class F>
  __device__ F sum(F v) const {
    for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
  }
  template <class F>
  __device__ F max(F v) const {
    for (int o = lanes / 2; o > 0; o /= 2) v = larger(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
  }
};

template <Scope scope>
struct Team {
  int rank, size;  // this thread's place in its team
  int merges = 0;  // so far

  __device__ Team() {
    rank = threadIdx.x;
    size = blockDim.x;
    if constexpr (scope == Scope::cluster) {
#if __CUDA_ARCH__ >= 900
      const auto cluster = cooperative_groups::this_cluster();
      rank += cluster.block_rank() * blockDim.x;
      size *= cluster.num_blocks();
      if (threadIdx.x == 0) init_mailboxes();
      cluster.sync();  // every block's mailboxes are ready from here on
#endif
    }
  }

  // The merge of all threads' states, the same in each. Buffers alternate, so that one barrier a merge is enough.
  template <class Op, class State>
  __device__ State merge(const Op& op, State state) {
    if constexpr (scope == Scope::warp) return op.merge(state, Lanes{size});
    constexpr int kWarps = kMaxThreads / 32;
    __shared__ State warps[2][kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, phase = merges % 2;
    state = op.merge(state, Lanes{32});
    if (lane == 0) warps[phase][warp] = state;
    __syncthreads();
    state = lane < blockDim.x / 32 ? warps[phase][lane] : Op::identity();
    state = op.merge(state, Lanes{32});
#if __CUDA_ARCH__ >= 900
    if constexpr (scope == Scope::cluster) state = merge_blocks(op, state);
#endif
    ++merges;
    return state;
  }

#if __CUDA_ARCH__ >= 900
 private:
  // Blocks send their states to each other's shared memory, and each waits for the bytes that it is owed. A barrier of
  // the cluster would also wait for the stores of the row before: 2 us a row where this takes a fraction of one.
  // A block that is one merge ahead writes the other buffer; to be two ahead it would need this block's next state,
  // which is sent after its last read of this one.
  __device__ static uint64_t* mailbox(int phase) {
    __shared__ uint64_t barriers[2];
    return &barriers[phase];
  }
  __device__ static uint32_t address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  }
  __device__ static uint32_t address_in(const void* shared, unsigned block) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(shared)), "r"(block));
    return remote;
  }
  __device__ static void init_mailboxes() {
    for (int phase = 0; phase < 2; ++phase)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(mailbox(phase))) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  template <class Op, class State>
  __device__ State merge_blocks(const Op& op, const State& state) {
    union Letter {
      State state;
      uint64_t words[(sizeof(State) + 7) / 8];
      __device__ Letter() {}
    };
    __shared__ __align__(8) unsigned char letters[2][kMaxRanks * sizeof(Letter)];
    const auto cluster = cooperative_groups::this_cluster();
    const unsigned blocks = cluster.num_blocks(), lane = threadIdx.x % 32;
    const int phase = merges % 2;
    Letter* const received = reinterpret_cast<Letter*>(letters[phase]);
    const uint32_t barrier = address(mailbox(phase));
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(static_cast<uint32_t>(blocks * sizeof(Letter)))
                   : "memory");
    if (threadIdx.x < blocks) {
      Letter mine;
      mine.state = state;
      const uint32_t to = address_in(&received[cluster.block_rank()], threadIdx.x);
      const uint32_t remote_barrier = address_in(mailbox(phase), threadIdx.x);
#pragma unroll
      for (int w = 0; w < int(sizeof(Letter) / 8); ++w)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to + 8 * w),
                     "l"(mine.words[w]), "r"(remote_barrier)
                     : "memory");
    }
    uint32_t done = 0;
    while (!done)
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(barrier), "r"(static_cast<uint32_t>(merges / 2 % 2))
          : "memory");
    return op.merge(lane < blocks ? received[lane].state : Op::identity(), Lanes{32});
  }
#endif
};

// ----------------------------------------------------------------------------------------------------- the row engine

// The part of a row in one thread's hands: NV vectors of V neighbouring columns. Where rows do not start on 16 bytes
// the vectors still do, and the first and the last of a row reach over its ends: what lies there is read, never used
// and never written.
template <int V, int NV, bool all_whole = false>
struct Span {
  int first, step;  // column of the first vector's first element, and the way to the next vector
  int columns;      // that the row has

  __device__ int column(int i) const { return first + i * step; }
  __device__ bool begins(int i) const { return all_whole || column(i) < columns; }
  __device__ bool whole(int i, int end) const { return all_whole || (column(i) >= 0 && column(i) + V <= end); }
  __device__ bool holds(int i, int j, int end) const {
    return all_whole || static_cast<unsigned>(column(i) + j) < static_cast<unsigned>(end);
  }
  // How many of the row's columns vector i has.
  __device__ int count(int i) const { return all_whole ? V : max(0, min(column(i) + V, columns) - max(column(i), 0)); }
};

template <int bytes>  // 4, 8 or 16
__device__ inline void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (bytes == 16)  // past the L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(global), "n"(bytes) : "memory");
#else
  using Word = std::conditional_t<bytes == 16, int4, std::conditional_t<bytes == 8, int2, int>>;
  *static_cast<Word*>(shared) = *static_cast<const Word*>(global);
#endif
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `pending` groups are on their way; the instruction takes a constant.
__device__ inline void wait_for_copies(int pending) {
#if __CUDA_ARCH__ >= 800
  switch (pending) {
#define MATMULS_WAIT(n) \
  case n: asm volatile("cp.async.wait_group " #n ";" ::: "memory"); break;
    MATMULS_WAIT(1)
    MATMULS_WAIT(2)
    MATMULS_WAIT(3)
    MATMULS_WAIT(4)
    MATMULS_WAIT(5)
    MATMULS_WAIT(6)
    MATMULS_WAIT(7)
#undef MATMULS_WAIT
    default: asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#endif
}

// The ends of rows that do not fill their vectors. Not inlined: the kernel should fit the instruction cache.
template <class F, int V>
struct Numbers {
  F at[V];
};
template <class F, int V>
__device__ __noinline__ Numbers<F, V> fill_outside(Numbers<F, V> numbers, int column, int end, F fill) {
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (static_cast<unsigned>(column + j) >= static_cast<unsigned>(end)) numbers.at[j] = fill;
  return numbers;
}
template <class T, class F, int V>
__device__ __noinline__ void store_inside(T* row, int64_t column_stride, int column, int end, Numbers<F, V> numbers) {
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (static_cast<unsigned>(column + j) < static_cast<unsigned>(end))
      row[(column + j) * column_stride] = T(numbers.at[j]);
}
template <class T, int V>
__device__ __noinline__ Words<T, V> load_inside(const T* row, int column, int end) {
  Words<T, V> words{};
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (static_cast<unsigned>(column + j) >= static_cast<unsigned>(end)) continue;
    const Words<T, 1> one = load_constant<T, 1>(row + column + j);
    if constexpr (sizeof(T) == 2) {
      words.at[j / 2] |= one.at[0] << (16 * (j % 2));
    } else {
#pragma unroll
      for (int w = 0; w < Words<T, 1>::kCount; ++w) words.at[j * Words<T, 1>::kCount + w] = one.at[w];
    }
  }
  return words;
}

// What goes out of one vector: all of it at once, or the columns that the row has.
template <class T, class F, int V, int NV, bool all_whole>
__device__ void store(T* row, int64_t column_stride, const Span<V, NV, all_whole>& span, int i, const F (&values)[V]) {
  if (V > 1 && span.whole(i, span.columns)) {
    store_past_l1(reinterpret_cast<Vec<T, V>*>(row + span.column(i)), pack<T>(values));
  } else {
    Numbers<F, V> numbers;
#pragma unroll
    for (int j = 0; j < V; ++j) numbers.at[j] = values[j];
    store_inside(row, column_stride, span.column(i), span.columns, numbers);
  }
}

// Columns of a row that is the same for all rows (a weight): from the L1 after the first. What lies outside is 0.
template <class T, int V, int NV, bool all_whole>
__device__ Words<T, V> load_columns(const T* row, const Span<V, NV, all_whole>& span, int i) {
  const T* from = row + span.column(i);
  if (span.whole(i, span.columns)) {
    if (V * sizeof(T) == 16 && reinterpret_cast<uintptr_t>(from) % 16 == 0) return load_aligned<T, V>(from);
    return load_constant<T, V>(from);
  }
  return load_inside<T, V>(row, span.column(i), span.columns);
}

struct RowShape {
  int64_t rows;
  int columns;
  int batches;     // spans of a row for each thread; 1 where the row is held in registers
  int stages;      // spans on their way
  int side_bytes;  // a vector's side part: what an operation fetches beside its inputs (a mask)
};

// Op, for a storage type T and arithmetic type F:
//   kInputs, State, identity()                what is read, what a row is folded into
//   kNumbersPerColumn, kNumbers               registers that a column takes, and that a thread has for its columns
//   kThreadsPerSm                             how many threads keep an SM busy
//   Row row(r)                                row r: `input(k)`, and how many columns are worth reading
//   fetch_side<V>(row, span, i, side)         the side part of vector i
//   fold(state, note, row, span, parts, side) the state with a span more; write sees note, and parts as fold left them
//   merge(state, lanes)                       the states of all lanes as one
//   finish(state)                             what write takes
//   write(row, result, note, span, parts[, sums])
//   kColumnSums                               whether write adds to `sums`, 2 NV V numbers that a thread keeps from row
//   write_sums(team, span, sums)              to row; only where its columns stay the same
template <class Op, int V, int NV, Scope scope, bool held>
__global__ void __launch_bounds__(kMaxThreads) rows_kernel(const __grid_constant__ Op op, const RowShape shape) {
  using T = typename Op::Storage;
  using F = typename Op::F;
  using Slot = Vec<T, V>;
  constexpr int K = Op::kInputs;
  extern __shared__ __align__(16) unsigned char shared[];
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const auto slot = [&](int stage, int i, int k) {
    return reinterpret_cast<Slot*>(shared) + ((stage * NV + i) * K + k) * threads + thread;
  };
  const auto side = [&](int stage, int i) {
    return shared + sizeof(Slot) * K * NV * threads * shape.stages +
           ((stage * NV + i) * threads + thread) * shape.side_bytes;
  };

  // In a warp several teams walk side by side; those past the last row go along with nothing in hand.
  Team<scope> team;
  const int beside = scope == Scope::warp ? threadIdx.y : 0;
  int64_t first = blockIdx.x, step = gridDim.x;
  if constexpr (scope == Scope::warp) {
    first *= blockDim.y;
    step *= blockDim.y;
  }
  if constexpr (scope == Scope::cluster) {
    const int blocks = team.size / blockDim.x;
    first /= blocks;
    step /= blocks;
  }

  const auto span_of = [&](const typename Op::Row& row, int batch) {
    int shift = 0;
    if constexpr (V > 1) shift = static_cast<int>(reinterpret_cast<uintptr_t>(row.input(0)) % 16 / sizeof(T));
    return Span<V, NV>{(team.rank + batch * NV * team.size) * V - shift, team.size * V, shape.columns};
  };
  const auto fetch = [&](const typename Op::Row& row, int batch, int stage) {
    const auto span = span_of(row, batch);
    const int visible = row.visible(shape.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
      if (span.column(i) >= visible) break;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if constexpr (V > 1)
          copy_async<16>(slot(stage, i, k), row.input(k) + span.column(i));
        else
          slot(stage, i, k)->at[0] = row.input(k)[span.column(i) * row.column_stride(k)];
      }
      op.template fetch_side<V, NV>(row, span, i, side(stage, i));
    }
  };
  F parts[NV][K][V];
  F sums[Op::kColumnSums ? 2 : 1][NV][V] = {};
  const auto take = [&](const typename Op::Row& row, const auto& span, int stage) {
    const int visible = row.visible(shape.columns);
#pragma unroll
    for (int i = 0; i < NV; ++i) {
#pragma unroll
      for (int k = 0; k < K; ++k) unpack(*slot(stage, i, k), parts[i][k]);
      if (span.whole(i, visible)) continue;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        Numbers<F, V> numbers;
#pragma unroll
        for (int j = 0; j < V; ++j) numbers.at[j] = parts[i][k][j];
        numbers = fill_outside(numbers, span.column(i), visible, Op::fill());
#pragma unroll
        for (int j = 0; j < V; ++j) parts[i][k][j] = numbers.at[j];
      }
    }
  };

  // The order of fetches: span after span, row after row; a row that is not held comes twice.
  int64_t ahead_row = first + beside;
  int ahead_batch = 0, ahead_stage = 0;
  const int batches_a_row = held ? 1 : 2 * shape.batches;
  const auto fetch_next = [&] {
    if (ahead_row < shape.rows) {
      fetch(op.row(ahead_row), ahead_batch < shape.batches ? ahead_batch : ahead_batch - shape.batches, ahead_stage);
      if (++ahead_batch == batches_a_row) {
        ahead_batch = 0;
        ahead_row += step;
      }
    }
    if (++ahead_stage == shape.stages) ahead_stage = 0;
    commit_copies();
  };
  for (int s = 0; s < shape.stages; ++s) fetch_next();

  // Most threads have whole vectors alone: for them there is code without a check for each.
  const auto with_span = [&](const Span<V, NV>& span, int end, const auto& body) {
    if (V > 1 && span.first >= 0 && span.column(NV - 1) + V <= end)
      body(Span<V, NV, true>{span.first, span.step, span.columns});
    else
      body(span);
  };
  int stage = 0;
  typename Op::template Note<V, NV> note;
  const auto fold = [&](typename Op::State& state, const typename Op::Row& row, const Span<V, NV>& span) {
    wait_for_copies(shape.stages - 1);
    with_span(span, row.visible(shape.columns), [&](const auto& s) {
      take(row, s, stage);
      op.fold(state, note, row, s, parts, [&](int i) { return side(stage, i); });
    });
    fetch_next();
    if (++stage == shape.stages) stage = 0;
  };
  const auto write = [&](const typename Op::Row& row, const auto& result, const Span<V, NV>& span) {
    with_span(span, shape.columns, [&](const auto& s) {
      if constexpr (Op::kColumnSums)
        op.write(row, result, note, s, parts, sums);
      else
        op.write(row, result, note, s, parts);
    });
  };
#pragma unroll 1
  for (int64_t base = first; base < shape.rows; base += step) {
    const int64_t r = base + beside;
    const bool live = scope != Scope::warp || r < shape.rows;
    const typename Op::Row row = op.row(live ? r : 0);
    typename Op::State state = Op::identity();
    if constexpr (held) {
      const auto span = span_of(row, 0);
      fold(state, row, span);
      const auto result = op.finish(team.merge(op, state));
      if (live) write(row, result, span);
    } else {
#pragma unroll 1
      for (int batch = 0; batch < shape.batches; ++batch) fold(state, row, span_of(row, batch));
      const auto result = op.finish(team.merge(op, state));
#pragma unroll 1
      for (int batch = 0; batch < shape.batches; ++batch) {
        typename Op::State again = Op::identity();
        fold(again, row, span_of(row, batch));
        if (live) write(row, result, span_of(row, batch));
      }
    }
  }
  if constexpr (Op::kColumnSums && held) {
    const int64_t mine = first + beside;
    op.write_sums(mine, span_of(op.row(mine < shape.rows ? mine : 0), 0), sums);
  }
}

// ----------------------------------------------------------------------------------------------------------- launch

struct RowConfig {
  Scope scope;
  int vectors;  // that a thread holds
  int threads;  // of a block, for one row
  int beside;   // rows that a block walks side by side
  int ranks;    // blocks of a cluster
  int stages;
  int blocks_per_sm;
  bool held;
};

constexpr int kOwnShared = 4096;  // bytes at most that the merge takes of a block's shared memory

// The kernels for short rows hold 1, 2, 3, 4, 6, 8 or `most` vectors a thread.
constexpr int compiled_vectors(int vectors, int most) {
  for (const int held : {1, 2, 3, 4, 6, 8})
    if (vectors <= held && held < most) return held;
  return most;
}

// How a row is shared out, measured on an H200. most: vectors of each input that a thread's registers hold.
// Few threads that hold much each need the fewest instructions a column; 512 of them an SM keep its memory busy
// (more rows on their way at once are slower: the accesses spread over more pages of memory).
inline RowConfig configure(int64_t vectors, bool clusters, int most, int slot_bytes, int threads_per_sm) {
  const auto up = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  const auto power = [](int64_t x) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(x))); };
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  RowConfig c{};
  c.ranks = c.beside = 1;
  c.held = true;
  const int64_t threads = up(up(vectors, most), 32) * 32;
  clusters &= properties->major >= 9;
  c.vectors = most;
  c.stages = 2;
  if (threads == 32) {
    c.scope = Scope::warp;
    // Up to 8 lanes share even a row that fewer could hold: their accesses lie side by side.
    c.threads = std::min(32, std::max(power(up(vectors, most)), std::min(8, power(up(vectors, 2)))));
    c.vectors = compiled_vectors(static_cast<int>(up(vectors, c.threads)), most);
    c.beside = 256 / c.threads;
  } else if (threads <= kMaxThreads) {
    c.scope = Scope::block;
    c.threads = static_cast<int>(threads);
  } else if (clusters && threads <= kMaxRanks * kMaxThreads) {
    c.scope = Scope::cluster;
    c.ranks = std::clamp(power(up(threads, 256)), 2, kMaxRanks);
    c.threads = static_cast<int>(up(up(threads, c.ranks), 32) * 32);
    c.stages = 1;
  } else {
    c.scope = Scope::block;
    c.threads = 256;
    c.held = false;
  }
  // What a block may have of shared memory is 227 KiB on sm_90, 64 KiB on sm_75.
  const auto bytes = [&] { return int64_t(c.stages) * c.vectors * c.threads * c.beside * slot_bytes; };
  const int64_t most_bytes = static_cast<int64_t>(properties->sharedMemPerBlockOptin) - kOwnShared;
  if (bytes() > most_bytes) c.stages = 1;
  while (bytes() > most_bytes) {
    c.threads /= 2;
    if (c.scope == Scope::cluster && c.ranks < kMaxRanks) {
      c.ranks *= 2;
    } else {
      c.scope = Scope::block;
      c.ranks = 1;
      c.held = false;
    }
  }
  c.blocks_per_sm = std::max(1, threads_per_sm / (c.threads * c.beside));
  const int64_t fit = static_cast<int64_t>(properties->sharedMemPerMultiprocessor) / (bytes() + kOwnShared);
  c.blocks_per_sm = static_cast<int>(std::clamp<int64_t>(fit, 1, c.blocks_per_sm));
  return c;
}

// Shared memory above 48 KiB and clusters of more than 8 blocks are asked for once per kernel and device.
template <auto kernel>
void permit(int device) {
  static std::atomic<uint64_t> done{0};
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (done.load(std::memory_order_relaxed) & bit) return;
  const auto* properties = at::cuda::getDeviceProperties(device);
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(properties->sharedMemPerBlockOptin) - kOwnShared));
  if (properties->major >= 9)
    C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  done.fetch_or(bit, std::memory_order_relaxed);
}

template <int V, int NV, Scope scope, bool held, class Op, class Prepare>
void launch_kernel(Op op, const RowConfig& c, RowShape shape, int slot_bytes, int64_t vectors, const Prepare& prepare) {
  constexpr auto kernel = rows_kernel<Op, V, NV, scope, held>;
  permit<kernel>(c10::cuda::current_device());
  const int64_t held_at_once = int64_t(NV) * c.threads * c.ranks;
  shape.batches = static_cast<int>((vectors + held_at_once - 1) / held_at_once);
  shape.stages = c.stages;
  const int64_t teams = (shape.rows + c.beside - 1) / c.beside;
  int64_t most = int64_t(at::cuda::getCurrentDeviceProperties()->multiProcessorCount) * c.blocks_per_sm / c.ranks;
  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(c.threads, c.beside);
  launch.dynamicSmemBytes = size_t(slot_bytes) * NV * c.stages * c.threads * c.beside;
  launch.stream = c10::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute cluster{};
  if constexpr (scope == Scope::cluster) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(c.ranks), 1, 1};
    launch.attrs = &cluster;
    launch.numAttrs = 1;
    launch.gridDim = dim3(c.ranks);
    int fit = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&fit, kernel, &launch));
    most = std::min<int64_t>(most, fit);
  }
  // With a multiple of V teams the rows of each are all at the same distance from 16 bytes: its columns stay.
  if (Op::kColumnSums && c.beside < V && most > V) most -= most % V;
  launch.gridDim = dim3(static_cast<unsigned>(std::max<int64_t>(1, std::min(teams, most)) * c.ranks));
  prepare(op, int64_t(launch.gridDim.x) / c.ranks * c.beside, held);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, op, shape));
}

// Whether 16-byte vectors serve the first P tensors of a row: columns side by side, and every row at the same distance
// from a multiple of 16 in all of them. `unaligned`: that distance is not always 0.
struct Alignment {
  bool vectors, unaligned;
};
template <class T, int N, size_t P>
Alignment alignment_of(const Rows<N>& rows, const std::array<const void*, P>& pointers) {
  const auto off = [&](int64_t elements) { return elements * static_cast<int64_t>(sizeof(T)) % 16 != 0; };
  const auto address = [&](int t) { return reinterpret_cast<intptr_t>(pointers[t]); };
  Alignment a{true, address(0) % 16 != 0};
  for (size_t t = 0; t < P; ++t) {
    a.vectors &= rows.column_strides[t] == 1 && (address(t) - address(0)) % 16 == 0;
    for (int d = 0; d < rows.dims; ++d) {
      a.vectors &= !off(rows.strides[t][d] - rows.strides[0][d]);
      a.unaligned |= off(rows.strides[0][d]);
    }
  }
  return a;
}

template <int V, class Op, class Prepare>
void launch_vectors(const Op& op, int64_t rows, int64_t columns, int side_bytes, bool unaligned,
                    const Prepare& prepare) {
  constexpr int kWords = V * Op::kNumbersPerColumn * static_cast<int>(sizeof(typename Op::F) / 4);
  constexpr int kMost = V == 1 ? 4 : Op::kNumbers / kWords;
  const int slot_bytes = static_cast<int>(sizeof(typename Op::Storage)) * V * Op::kInputs + side_bytes;
  const int64_t vectors = (columns + V - 1) / V + (unaligned && V > 1);
  const RowConfig c = configure(vectors, V > 1, kMost, slot_bytes, Op::kThreadsPerSm);
  const RowShape shape{rows, static_cast<int>(columns), 1, 1, side_bytes};
  const auto go = [&]<int NV, Scope scope, bool held>() {
    launch_kernel<V, NV, scope, held>(op, c, shape, slot_bytes, vectors, prepare);
  };
  if (!c.held) return go.template operator()<kMost, Scope::block, false>();
  if (c.scope == Scope::block) return go.template operator()<kMost, Scope::block, true>();
  if constexpr (V > 1) {
    if (c.scope == Scope::cluster) return go.template operator()<kMost, Scope::cluster, true>();
    const auto warps = [&]<int NV>() { go.template operator()<compiled_vectors(NV, kMost), Scope::warp, true>(); };
    switch (c.vectors) {
      case 1: return warps.template operator()<1>();
      case 2: return warps.template operator()<2>();
      case 3: return warps.template operator()<3>();
      case 4: return warps.template operator()<4>();
      case 6: return warps.template operator()<6>();
      case 8: return warps.template operator()<8>();
    }
  }
  go.template operator()<kMost, Scope::warp, true>();
}

// Runs an operation over its rows. pointers: the tensors that are read or written by vectors; side_element: bytes a
// column of what a slot holds beside the inputs; prepare(op, teams, sums) is called before the launch, `sums` where a
// team's columns stay from row to row.
constexpr auto kNothingToPrepare = [](auto&&...) {};
template <class Op, int N, size_t P, class Prepare = decltype(kNothingToPrepare)>
void launch_rows(const Op& op, const Rows<N>& rows, const std::array<const void*, P>& pointers, int side_element,
                 const Prepare& prepare = kNothingToPrepare) {
  using T = typename Op::Storage;
  constexpr int V = 16 / sizeof(T);
  TORCH_CHECK(rows.columns < INT32_MAX - 4096, "expected rows of fewer than 2^31 columns, got ", rows.columns);
  const auto a = alignment_of<T>(rows, pointers);
  if (a.vectors) {
    launch_vectors<V>(
        op, rows.count, rows.columns, V * side_element, a.unaligned, [&](Op& o, int64_t teams, bool held) {
          const bool columns_stay = !a.unaligned || (rows.dims <= 1 && (teams % V == 0 || teams >= rows.count));
          prepare(o, teams, held && columns_stay);
        });
  } else {
    launch_vectors<1>(op, rows.count, rows.columns, 0, false, prepare);
  }
}

}  // namespace matmuls
