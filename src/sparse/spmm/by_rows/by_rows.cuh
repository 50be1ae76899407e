// The row kernels of csr_spmm (sum and mean) on a GPU:
//   spmm_rows_kernel: a team of lanes sums neighbouring rows, or a piece of a long row
//   spmm_shares_kernel: a group of lanes sums a merge-path share of rows and nonzeros, for skewed matrices
//   spmm_long_rows_kernel: second step, adds the pieces of rows that were cut
// The order of additions depends only on shapes, the lengths of rows, the operands' alignment and strides, and the GPU.
#pragma once

#include "sparse/csr.cuh"
#include "sparse/spmm/fit_flags.cuh"

namespace matmuls {

template <class T, class I>
struct SpmmArgs {
  const I *crow, *col, *order;
  const T *values, *dense;
  T* out;
  int64_t rows, nonzeros;
  int n;
  int64_t values_batch, dense_batch, out_batch, dense_stride, out_stride;
  uint32_t dense_row_bytes;  // dense_stride in bytes
  int64_t batches;
  arithmetic_t<T> alpha, beta;
  bool mean;
  // Grid: for each slice of B's columns `blocks` blocks, of which the first piece_blocks do pieces, the others rows.
  unsigned blocks, piece_blocks, slices;
  int rows_each;  // rows of A per team
  bool slices_first;
  // Long rows are cut at multiples of `slot`. Teams cut rows of more than 2 * slot nonzeros and count nonzeros; shares
  // cut rows of more than slot nonzeros and count nonzeros plus the rows before them. slots == 0: no row is cut.
  int64_t slot, slots;
  // partial [batch, slots, 2, n]: a slot's part 0 of a row that began in an earlier slot, 1 of a row that begins in it.
  arithmetic_t<T>* partial;
  int64_t* begins;  // [slots]: the long row that begins in the slot, or -1
  // 16-bit, optional: flags of a densified product that has already written out (sparse/spmm/densified/densified.h).
  // out is written again only if A or B is unfit.
  const FitFlags *facts, *dense_facts;

  // Waits for earlier kernels (griddepcontrol.wait), then says whether this one has nothing to do.
  __device__ bool has_nothing_to_do() const {
    ptx::griddepcontrol_wait();
    return sizeof(T) == 2 && facts && !facts->unfit && !dense_facts->unfit;
  }

  __device__ bool is_long(int64_t length) const { return slots > 0 && length > 2 * slot; }
  __device__ arithmetic_t<T> scale(int64_t length) const {
    return mean && length > 0 ? alpha / static_cast<arithmetic_t<T>>(length) : alpha;
  }
};

constexpr unsigned kWarp = 0xffffffffu;

template <class F>
struct Entry {
  uint32_t column;
  F value;
};

// The nonzero that this lane loads for its group of L lanes: entry p + lane, or zeros if fewer than lane + 1 are
// `left`.
template <int L, class T, class I>
__device__ Entry<arithmetic_t<T>> entry_of_lane(const SpmmArgs<T, I>& m, const T* values, I p, int left) {
  const int lane = threadIdx.x % L;
  if (lane >= left) return {0, 0};
  const I at = m.order ? ptx::load_first_out(m.order + p + lane) : p + lane;
  return {static_cast<uint32_t>(ptx::load_first_out(m.col + p + lane)),
          static_cast<arithmetic_t<T>>(ptx::load_first_out(values + at))};
}

// U entries for each of P parts of L lanes, from the entries that the parts' lanes hold, with their rows of B: R
// vectors of V columns per lane. All loads are in flight at once. `whole`: all entries exist.
template <class T, int V, int R, int U>
struct Ahead {
  Words<T, V> words[U][R];
  arithmetic_t<T> value[U];

  template <bool whole, int L, int P, class F>
  __device__ void load(const Entry<F>& entry, int from, int left, const T* dense, uint32_t row_bytes) {
    const int part = threadIdx.x % (L * P) / L;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = u * P + part;
      const uint32_t column = __shfl_sync(kWarp, entry.column, from + at, L * P);
      value[u] = __shfl_sync(kWarp, entry.value, from + at, L * P);
      // Unsigned on purpose: with signed numbers, or with mad.wide as it stands, ptxas emits more instructions.
      const auto* const row =
          reinterpret_cast<const T*>(reinterpret_cast<const char*>(dense) + static_cast<uint64_t>(column) * row_bytes);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if constexpr (!whole) words[u][r] = {};  // entries past the end add 0 * 0
        if (whole || at < left) words[u][r] = load_vector<T, V>(row + r * L * V);
      }
    }
  }

  template <class F>
  __device__ void add(int u, F (&sums)[R][V]) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      F numbers[V];
      unpack(words[u][r], numbers);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[r][v] += value[u] * numbers[v];
    }
  }
};

template <int L, class T, int V, int R, class F>
__device__ void write_row(T* out, F scale, F beta, F (&sums)[R][V]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int v = 0; v < V; ++v) sums[r][v] *= scale;
    if (beta != 0) {
      F old[V];
      unpack(load_vector<T, V, false>(out + r * L * V), old);
#pragma unroll
      for (int v = 0; v < V; ++v) sums[r][v] += beta * old[v];
    }
    store_vector(out + r * L * V, sums[r]);
  }
}

template <int L, int V, int R, class F>
__device__ void keep_piece(F* kept, const F (&sums)[R][V]) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int v = 0; v < V; ++v) kept[r * L * V + v] = sums[r][v];
}

// ---------------------------------------------------------------------------------------------------- rows by teams

// A team is L lanes for columns of B times P parts for nonzeros of A. It sums neighbouring rows, and lane i holds the
// range of row first + i; or it sums one piece of a long row into partial[first].
template <class F, class I>
struct Rows {
  int64_t first;
  I begin;
  int length;  // nonzeros; -1: this team does not write the row
  F scale;
};

template <int L, class T, class I>
__device__ Rows<arithmetic_t<T>, I> rows_of_team(const SpmmArgs<T, I>& m, int64_t team) {
  const int64_t first = team * m.rows_each, row = first + threadIdx.x % L;
  Rows<arithmetic_t<T>, I> mine{first, 0, -1, m.alpha};
  if (static_cast<int>(threadIdx.x % L) >= m.rows_each || row >= m.rows) return mine;
  mine.begin = m.crow[row];
  const int64_t length = m.crow[row + 1] - mine.begin;
  if (m.is_long(length)) return mine;
  mine.length = static_cast<int>(length);
  mine.scale = m.scale(length);
  return mine;
}

// The piece of a long row that item = 2 * slot + part names: part 0 of a row that began before the slot, part 1 of one
// that begins in it. A long row is longer than a slot, so there is at most one of each. All lanes of the warp must call
// it.
template <int L, class T, class I>
__device__ Rows<arithmetic_t<T>, I> piece_of_team(const SpmmArgs<T, I>& m, int64_t item, bool writes_begins) {
  const bool exists = item < 2 * m.slots;
  const int64_t slot = exists ? item / 2 : 0, part = item % 2;
  const int64_t begin = slot * m.slot, end = min(begin + m.slot, m.nonzeros);
  const int64_t row = row_of_group<L>(m.crow, m.rows, part == 0 ? begin : end - 1);
  const int64_t row_begin = m.crow[row], row_end = m.crow[row + 1];
  const bool is_long = m.is_long(row_end - row_begin), begins = row_begin >= begin;
  if (writes_begins && exists && part == 1) m.begins[slot] = is_long && begins ? row : -1;
  Rows<arithmetic_t<T>, I> piece{item, 0, -1, 1};
  if (!exists || !is_long || begins != (part == 1)) return piece;
  piece.begin = static_cast<I>(max(begin, row_begin));
  piece.length = static_cast<int>(min(end, row_end) - piece.begin);
  return piece;
}

// Adds a block of up to L * P entries to sums. `left` nonzeros of the row remain, this block's included; there may be
// more than fit.
template <int L, int P, int U, class T, int V, int R, class F>
__device__ void add_block(const Entry<F>& entry, int left, const T* dense, uint32_t row_bytes, F (&sums)[R][V]) {
  constexpr int kTeam = L * P, kStep = U * P;
  static_assert(kTeam % kStep == 0);
#pragma unroll(kTeam <= 2 * kStep ? kTeam / kStep : 1)
  for (int j = 0; j < kTeam; j += kStep) {
    if (!__any_sync(kWarp, j < left)) break;
    Ahead<T, V, R, U> ahead;
    if (__all_sync(kWarp, j + kStep <= left)) {
      ahead.template load<true, L, P>(entry, j, left - j, dense, row_bytes);
#pragma unroll
      for (int u = 0; u < U; ++u) ahead.add(u, sums);
    } else {
      ahead.template load<false, L, P>(entry, j, left - j, dense, row_bytes);
#pragma unroll
      for (int u = 0; u < U; ++u) ahead.add(u, sums);
    }
  }
}

// Team of L * P lanes, for one row of A with nonzeros a0, a1, ... :
//
//                     columns of B
//             lane 0   lane 1   ...  lane L-1       V * R columns each
//   part 0    a0 aP a2P ...
//   part 1    a1 aP+1 ...
//   ...                                            at the end a butterfly shuffle adds the parts
//
// Blocks for pieces of long rows come first, because they take longest. n is a multiple of V, with R > 1 of a slice.
// The teams of a warp advance from row to row together, because every shuffle involves the whole warp. While a block of
// up to L * P entries is multiplied, the next one is loading. Without kBlocks ptxas saves registers in the wrong place
// and keeps only one row of B in flight.
template <class T, class I, int V, int L, int P, int R, int U, int kBlocks>
__global__ void __launch_bounds__(kSparseThreads, kBlocks) spmm_rows_kernel(const __grid_constant__ SpmmArgs<T, I> m) {
  using F = arithmetic_t<T>;
  constexpr int kTeam = L * P;
  // No early griddepcontrol.launch_dependents: the next kernel's blocks would spread unevenly over multiprocessors
  // (4096x4096, 95 % zeros, 128 columns: 39 microseconds instead of 35).
  if (m.has_nothing_to_do()) return;
  const unsigned slice = m.slices_first ? blockIdx.x % m.slices : blockIdx.x / m.blocks;
  const unsigned block = m.slices_first ? blockIdx.x / m.slices : blockIdx.x % m.blocks;
  const bool pieces = block < m.piece_blocks;
  const int own = static_cast<int>(slice) * (L * V * R) + threadIdx.x % L * V;
  const int c = min(own, m.n - V);  // lanes past the last column reread it: the shuffles need them
  const int64_t team =
      static_cast<int64_t>(pieces ? block : block - m.piece_blocks) * (kSparseThreads / kTeam) + threadIdx.x / kTeam;
  const bool writes = own < m.n && threadIdx.x % kTeam < L;
  const Rows<F, I> mine =
      pieces ? piece_of_team<kTeam>(m, team, own == 0 && blockIdx.z == 0) : rows_of_team<kTeam>(m, team);
  const int count = pieces ? 1 : m.rows_each;
#pragma unroll 1
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch + c;
    I p = __shfl_sync(kWarp, mine.begin, 0, kTeam);
    int length = __shfl_sync(kWarp, mine.length, 0, kTeam);
    Entry<F> entry = entry_of_lane<kTeam>(m, values, p, length);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const I next_begin = __shfl_sync(kWarp, mine.begin, k + 1, kTeam);
      const int next_lane_length = __shfl_sync(kWarp, mine.length, k + 1, kTeam);
      const int next_length = k + 1 < count ? next_lane_length : 0;
      F sums[R][V] = {};
      bool more = true;
#pragma unroll 1
      for (int left = length; more; left -= kTeam, p += kTeam) {
        more = __any_sync(kWarp, left > kTeam);
        const Entry<F> next =
            entry_of_lane<kTeam>(m, values, more ? p + kTeam : next_begin, more ? left - kTeam : next_length);
        add_block<L, P, U>(entry, left, dense, m.dense_row_bytes, sums);
        entry = next;
      }
#pragma unroll
      for (int step = L; step < kTeam; step *= 2)  // all parts get the same bits
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int v = 0; v < V; ++v) sums[r][v] += __shfl_xor_sync(kWarp, sums[r][v], step);
      const F scale = __shfl_sync(kWarp, mine.scale, k, kTeam);
      if (writes && length >= 0) {
        if (pieces)
          keep_piece<L>(m.partial + (batch * m.slots * 2 + mine.first) * m.n + own, sums);
        else
          write_row<L>(m.out + batch * m.out_batch + (mine.first + k) * m.out_stride + own, scale, m.beta, sums);
      }
      p = next_begin, length = next_length;
    }
  }
}

// ------------------------------------------------------------------------------------------------ merge-path shares

// Binary search on the merge path, where row r begins at step r + crow[r]: finds the rows in progress at two steps. A
// group of L lanes searches together, one probe per lane. All lanes of the warp must call it.
template <int L, class I>
__device__ void rows_at(const I* crow, int64_t rows, const int64_t (&at)[2], int64_t (&found)[2]) {
  const int lane = threadIdx.x % L, shift = threadIdx.x % 32 / L * L;
  found[0] = found[1] = 0;
  for (int64_t span = rows; span > 1;) {  // the rows are in [found, found + span)
    const int64_t step = (span + L - 1) / L;
    int64_t begin[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t probe = found[i] + lane * step;
      begin[i] = lane * step < span && probe < rows ? probe + static_cast<int64_t>(crow[probe]) : INT64_MAX;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned votes = __ballot_sync(kWarp, lane == 0 || begin[i] <= at[i]) >> shift;
      found[i] += (__popc(L == 32 ? votes : votes & ((1u << L % 32) - 1)) - 1) * step;
    }
    span = step;
  }
}

// A share: the rows that begin within `slot` steps of the merge path. Only a row longer than a slot is cut; its share
// holds the part within these steps:
//
//   steps      | slot k-1     | slot k       | slot k+1     |
//   long row         [ begins--|--goes on-----|--ends ]
//   named as            behind | before       | before
template <class I>
struct Share {
  I row, end_row;    // [row, end_row) of A
  I begin, end;      // range of their nonzeros, without the parts cut off
  I row_begin;       // where the first row begins
  I before, behind;  // the row that began in an earlier share, that begins here and goes on in the next; -1: none
};

template <int L, class T, class I>
__device__ Share<I> share_of_group(const SpmmArgs<T, I>& m, int64_t share) {
  const bool exists = share < m.slots;
  const int64_t from = exists ? share * m.slot : 0, to = from + m.slot;
  int64_t found[2];
  rows_at<L>(m.crow, m.rows, {from, to - 1}, found);
  const int64_t head = found[0], tail = found[1];
  const int64_t head_begin = m.crow[head], head_end = m.crow[head + 1];
  const int64_t tail_begin = m.crow[tail], tail_end = m.crow[tail + 1];
  const bool whole = head + head_begin == from;  // the first row begins at the first step
  const bool goes_on = !whole && head_end - head_begin > m.slot && head + head_end > from;
  const bool begins = exists && (tail > head || whole);  // some row begins in this share
  const bool cut = begins && tail_end - tail_begin > m.slot && tail + tail_end > to;
  Share<I> s{};
  s.before = exists && goes_on ? static_cast<I>(head) : I(-1), s.behind = cut ? static_cast<I>(tail) : I(-1);
  if (!exists || (!begins && !goes_on)) return s;
  s.row = static_cast<I>(whole || goes_on ? head : head + 1), s.end_row = static_cast<I>(tail + 1);
  s.begin = static_cast<I>(goes_on ? from - head : whole ? head_begin : head_end);
  s.end = static_cast<I>(!begins ? min(to - head, head_end) : cut ? to - tail : tail_end);
  s.row_begin = static_cast<I>(goes_on ? head_begin : static_cast<int64_t>(s.begin));
  return s;
}

// A group of L lanes takes one share and keeps the loads of U nonzeros in flight, across row ends: skewed matrices keep
// all groups busy, and short rows do not wait for one another.
template <class T, class I, int V, int L, int R, int U, int kBlocks>
__global__ void __launch_bounds__(kSparseThreads, kBlocks)
    spmm_shares_kernel(const __grid_constant__ SpmmArgs<T, I> m) {
  using F = arithmetic_t<T>;
  if (m.has_nothing_to_do()) return;
  const unsigned slice = blockIdx.x / m.blocks, block = blockIdx.x % m.blocks;
  const int own = static_cast<int>(slice) * (L * V * R) + threadIdx.x % L * V;
  const int c = min(own, m.n - V);  // as in spmm_rows_kernel
  const int64_t share = static_cast<int64_t>(block) * (kSparseThreads / L) + threadIdx.x / L;
  const Share<I> s = share_of_group<L>(m, share);
  if (own == 0 && blockIdx.z == 0 && share < m.slots) m.begins[share] = s.behind;
#pragma unroll 1
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch + c;
    I row = s.row, p = s.begin, row_begin = s.row_begin;
    int left = static_cast<int>(s.end - s.begin);
    // until: nonzeros from p to the row's end; -1: no row left. next_end: where the row after it ends.
    int until = row < s.end_row ? static_cast<int>(min(m.crow[row + 1], s.end) - p) : -1;
    I next_end = row + 1 < s.end_row ? m.crow[row + 2] : s.end;
    F sums[R][V] = {};
    const auto finish = [&](int done) {  // writes the rows that end `done` nonzeros after p
      while (until == done) {
        if (own < m.n) {
          if (row == s.before || row == s.behind)
            keep_piece<L>(m.partial + ((batch * m.slots + share) * 2 + (row == s.behind)) * m.n + own, sums);
          else
            write_row<L>(m.out + batch * m.out_batch + static_cast<int64_t>(row) * m.out_stride + own,
                         m.scale(p + done - row_begin), m.beta, sums);
        }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int v = 0; v < V; ++v) sums[r][v] = 0;
        row_begin = static_cast<I>(p + done);
        ++row;
        until = row < s.end_row ? static_cast<int>(min(next_end, s.end) - p) : -1;
        next_end = row + 1 < s.end_row ? m.crow[row + 2] : s.end;
      }
    };
    Entry<F> entry = entry_of_lane<L>(m, values, p, left);
    finish(0);
    bool more = true;
#pragma unroll 1
    while (more) {
      more = __any_sync(kWarp, left > L);
      const Entry<F> next = entry_of_lane<L>(m, values, static_cast<I>(p + L), left - L);
#pragma unroll 1
      for (int j = 0; j < L; j += U) {
        if (!__any_sync(kWarp, j < left)) break;
        Ahead<T, V, R, U> ahead;
        if (__all_sync(kWarp, j + U <= left))
          ahead.template load<true, L, 1>(entry, j, left - j, dense, m.dense_row_bytes);
        else
          ahead.template load<false, L, 1>(entry, j, left - j, dense, m.dense_row_bytes);
        const bool ends = __any_sync(kWarp, until >= 0 && until <= j + U);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          ahead.add(u, sums);
          if (ends) finish(j + u + 1);
        }
      }
      entry = next, left -= L, p = static_cast<I>(p + L), until -= L;
    }
  }
}

// -------------------------------------------------------------------------------- second step: pieces of long rows

// Adds the pieces of each long row, in order. The warp of the slot where the row begins does it, V columns per lane.
// counts_rows: slots count rows and nonzeros, as shares do.
template <class T, class I, int V>
__global__ void __launch_bounds__(kSparseThreads)
    spmm_long_rows_kernel(const __grid_constant__ SpmmArgs<T, I> m, bool counts_rows) {
  using F = arithmetic_t<T>;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / 32) + threadIdx.x / 32;
  if (m.has_nothing_to_do() || slot >= m.slots) return;
  const int64_t row = m.begins[slot];
  if (row < 0) return;
  const int64_t row_end = m.crow[row + 1], last = ((counts_rows ? row : 0) + row_end - 1) / m.slot;
  const F scale = m.scale(row_end - static_cast<int64_t>(m.crow[row]));
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    T* const out = m.out + batch * m.out_batch + row * m.out_stride;
    const F* const partial = m.partial + batch * m.slots * 2 * m.n;
    for (int64_t c = (blockIdx.y * 32 + threadIdx.x % 32) * V; c < m.n; c += gridDim.y * 32 * V) {
      const auto piece = [&](int64_t which, F(&numbers)[V]) {
        unpack(load_vector<F, V>(partial + which * m.n + c), numbers);
      };
      F sums[V];
      piece(slot * 2 + 1, sums);
#pragma unroll 4
      for (int64_t s = slot + 1; s <= last; ++s) {
        F numbers[V];
        piece(s * 2, numbers);
#pragma unroll
        for (int v = 0; v < V; ++v) sums[v] += numbers[v];
      }
#pragma unroll
      for (int v = 0; v < V; ++v)
        out[c + v] = T(m.beta != 0 ? scale * sums[v] + m.beta * static_cast<F>(out[c + v]) : scale * sums[v]);
    }
  }
}

}  // namespace matmuls
