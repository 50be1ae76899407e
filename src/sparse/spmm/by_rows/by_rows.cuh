// The sums of csr_spmm on a GPU, three kernels: rows by teams of lanes, shares of equal work by groups of lanes, and
// the second step where a row was cut. Their order of additions depends on the shapes, the lengths of rows, how the
// operands lie and the GPU alone.
#pragma once

#include "sparse/csr.cuh"
#include "sparse/spmm/fill_facts.cuh"

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
  // The grid: `blocks` blocks, those for pieces before those for rows, for each slice of the columns.
  unsigned blocks, piece_blocks, slices;
  int rows_each;  // of a team
  bool slices_first;
  // Long rows are cut where multiples of `slot` end: by teams, rows longer than 2 * slot, counting nonzeros; by shares,
  // rows longer than slot, counting nonzeros and the rows before them. Without slots none is.
  int64_t slot, slots;
  arithmetic_t<T>*
      partial;      // [batch, slots, 2, n]: of a row that began before a slot, and of one that goes on after it
  int64_t* begins;  // [slots]: the long row that begins in a slot, or -1
  // Of 16 bits, where given: the rows have been written (sparse/spmm/densified/densified.h), and are written again only
  // if A or the dense side does not fit.
  const FillFacts *facts, *dense_facts;

  // Waits for the kernels before this one.
  __device__ bool spared() const {
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

// The nonzero that a lane reads for its L lanes: `left` of them from p on.
template <int L, class T, class I>
__device__ Entry<arithmetic_t<T>> entry_of_lane(const SpmmArgs<T, I>& m, const T* values, I p, int left) {
  const int lane = threadIdx.x % L;
  if (lane >= left) return {0, 0};
  const I at = m.order ? ptx::load_first_out(m.order + p + lane) : p + lane;
  return {static_cast<uint32_t>(ptx::load_first_out(m.col + p + lane)),
          static_cast<arithmetic_t<T>>(ptx::load_first_out(values + at))};
}

// U entries for each of P parts of L lanes, out of those that the parts hold together, and the dense rows that they
// name, R vectors of V columns a lane: all on their way at once. `whole`: all of them exist.
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
      // Unsigned on purpose: of signed numbers, or of mad.wide as it stands, ptxas makes more instructions.
      const auto* const row =
          reinterpret_cast<const T*>(reinterpret_cast<const char*>(dense) + static_cast<uint64_t>(column) * row_bytes);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if constexpr (!whole) words[u][r] = {};  // past the end 0 * 0 is added
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

// ----------------------------------------------------------------------------------------------------- rows by teams

// A team, L lanes in each of P parts, sums neighbouring rows, of which lane i knows the nonzeros of row first + i; or a
// piece of a long row, whose sums wait in the workspace at `first`.
template <class F, class I>
struct Rows {
  int64_t first;
  I begin;
  int length;  // -1: not this team's to write
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

// A long row is longer than a slot: one may have begun before a slot (part 0), and one may begin in it (part 1). All
// lanes of a warp come here.
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

// sums += those of a block of up to L * P entries that have `left` nonzeros of a row, maybe more, before them.
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

// Blocks for the pieces of long rows come first, since they take longest. A row's nonzeros go to the parts of its team
// in turn; n is a multiple of V, with R > 1 of a slice. The teams of a warp go from row to row together: every shuffle
// is of the whole warp. While a block of up to L * P entries is multiplied, the next is on its way. Without kBlocks
// ptxas saves registers where it should not: it has one dense row at a time on its way.
template <class T, class I, int V, int L, int P, int R, int U, int kBlocks>
__global__ void __launch_bounds__(kSparseThreads, kBlocks) spmm_rows_kernel(const __grid_constant__ SpmmArgs<T, I> m) {
  using F = arithmetic_t<T>;
  constexpr int kTeam = L * P;
  // The next kernel is not let in early: its blocks would come to lie unevenly (4096x4096, 95 % zeros, 128 columns: 39
  // microseconds for 35).
  if (m.spared()) return;
  const unsigned slice = m.slices_first ? blockIdx.x % m.slices : blockIdx.x / m.blocks;
  const unsigned block = m.slices_first ? blockIdx.x / m.slices : blockIdx.x % m.blocks;
  const bool pieces = block < m.piece_blocks;
  const int own = static_cast<int>(slice) * (L * V * R) + threadIdx.x % L * V;
  const int c = min(own, m.n - V);  // lanes past the last column read it again: the shuffles need them
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
      for (int step = L; step < kTeam; step *= 2)  // the parts' sums, the same bits in each
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

// ---------------------------------------------------------------------------------------------------- equal shares

// A matrix is a way of rows and nonzeros: row r begins at r + crow[r]. The rows that go on at two points of it, by a
// group of L lanes in steps of L. All lanes of a warp come here.
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

// A share: the rows that begin on `slot` steps of the way. Where the first goes on from the share before, or the last
// into the next, it is long and was cut.
template <class I>
struct Share {
  I row, end_row;    // [row, end_row)
  I begin, end;      // their nonzeros, without those cut off
  I row_begin;       // of the first row
  I before, behind;  // the row that was cut at the share's begin, at its end, or -1
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
  const bool whole = head + head_begin == from;  // the first row begins here
  const bool goes_on = !whole && head_end - head_begin > m.slot && head + head_end > from;
  const bool begins = exists && (tail > head || whole);  // any row does
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

// L lanes, a group, take a share. U nonzeros are on their way at once, whatever rows they belong to: skewed matrices
// keep all groups busy, and short rows do not wait for one another.
template <class T, class I, int V, int L, int R, int U, int kBlocks>
__global__ void __launch_bounds__(kSparseThreads, kBlocks)
    spmm_shares_kernel(const __grid_constant__ SpmmArgs<T, I> m) {
  using F = arithmetic_t<T>;
  if (m.spared()) return;
  const unsigned slice = blockIdx.x / m.blocks, block = blockIdx.x % m.blocks;
  const int own = static_cast<int>(slice) * (L * V * R) + threadIdx.x % L * V;
  const int c = min(own, m.n - V);  // as above
  const int64_t share = static_cast<int64_t>(block) * (kSparseThreads / L) + threadIdx.x / L;
  const Share<I> s = share_of_group<L>(m, share);
  if (own == 0 && blockIdx.z == 0 && share < m.slots) m.begins[share] = s.behind;
#pragma unroll 1
  for (int64_t batch = blockIdx.z; batch < m.batches; batch += gridDim.z) {
    const T* const values = m.values + batch * m.values_batch;
    const T* const dense = m.dense + batch * m.dense_batch + c;
    I row = s.row, p = s.begin, row_begin = s.row_begin;
    int left = static_cast<int>(s.end - s.begin);
    // Nonzeros from p to the end of the row, and where the next one ends.
    int until = row < s.end_row ? static_cast<int>(min(m.crow[row + 1], s.end) - p) : -1;
    I next_end = row + 1 < s.end_row ? m.crow[row + 2] : s.end;
    F sums[R][V] = {};
    const auto finish = [&](int done) {  // the rows that end after `done` nonzeros from p
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

// ----------------------------------------------------------------------------------------------------- the second step

// The pieces of each long row, added in their order by the lanes of the slot where it begins: V columns a lane.
// counts_rows: slots count rows and nonzeros, as shares do.
template <class T, class I, int V>
__global__ void __launch_bounds__(kSparseThreads)
    spmm_long_rows_kernel(const __grid_constant__ SpmmArgs<T, I> m, bool counts_rows) {
  using F = arithmetic_t<T>;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * (kSparseThreads / 32) + threadIdx.x / 32;
  if (m.spared() || slot >= m.slots) return;
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
