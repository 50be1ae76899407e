// Kernels of csr_spmm_chunks (kernel.h, layout.h).
#pragma once

#include "sparse/csr.cuh"

namespace matmuls {

template <class T>
struct ChunkArgs {
  const int *begins, *ends, *cut, *empty;
  const int *col, *order;  // nonzero p has the value order[p], without order p
  const T *values, *dense;
  T* out;
  float* partial;  // [slots, n]
  int chunks, cuts, empties, rows, n;
  uint32_t dense_row_bytes;
  unsigned chunk_blocks, blocks, slices;
};

constexpr int kEmptyRows = 8;  // that a group of lanes writes

// A nonzero as one lane holds it. Past a chunk's end the last nonzero repeats with end = -1: its product is added but
// never written.
struct ChunkEntry {
  int column, end;
  float value;
};

template <class T>
__device__ ChunkEntry chunk_entry(const ChunkArgs<T>& m, int begin, int at, int size) {
  if (size <= 0) return {0, -1, 0};
  const int p = begin + min(at, size - 1);
  const int q = m.order ? ptx::load_first_out(m.order + p) : p;
  const int end = ptx::load_first_out(m.ends + p);
  return {ptx::load_first_out(m.col + p), at < size ? end : -1, static_cast<float>(ptx::load_first_out(m.values + q))};
}

template <class T, int V>
__device__ void store_row(T* to, const float (&sums)[V]) {
  if constexpr (V * sizeof(T) == 16) {
    store_vector(to, sums);
  } else {
    static_assert(V * sizeof(T) == 8);
    const Words<T, V> words = pack<T, V>(sums);
    *reinterpret_cast<uint2*>(to) = make_uint2(words.at[0], words.at[1]);
  }
}

// Writes sums to the row of the result, or to the slot of a piece. Few branches, because lanes diverge here all the
// time.
template <class T, int V>
__device__ void write_end(const ChunkArgs<T>& m, int end, int column, bool writes, const float (&sums)[V]) {
  const bool whole = end < m.rows;
  if constexpr (sizeof(T) == 4) {
    float* const to = whole ? m.out : m.partial;
    const int row = whole ? end : end - m.rows;
    if (writes) store_vector(to + static_cast<int64_t>(row) * m.n + column, sums);
  } else {
    if (writes && whole) store_row<T, V>(m.out + static_cast<int64_t>(end) * m.n + column, sums);
    if (writes && !whole) {
      float* const to = m.partial + static_cast<int64_t>(end - m.rows) * m.n + column;
#pragma unroll
      for (int v = 0; v < V; v += 4)
        *reinterpret_cast<float4*>(to + v) = make_float4(sums[v], sums[v + 1], sums[v + 2], sums[v + 3]);
    }
  }
}

// A group of L lanes runs through a chunk, U nonzeros at once. The groups of a warp stay together, because shuffles
// involve the whole warp.
template <class T, int V, int L, int U, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) spmm_chunks_kernel(const __grid_constant__ ChunkArgs<T> m) {
  constexpr int kGroups = kThreads / L;
  constexpr unsigned kAll = 0xffffffffu;
  constexpr unsigned kFirsts = L == 32 ? 1u : L == 16 ? 0x10001u : 0x1010101u;  // lane 0 of every group
  static_assert(L >= 8 && L % U == 0);
  ptx::griddepcontrol_wait();
  if (m.cuts > 0) ptx::griddepcontrol_launch_dependents();  // spmm_pieces_kernel
  const unsigned slice = blockIdx.x / m.blocks, block = blockIdx.x % m.blocks;
  const int lane = static_cast<int>(threadIdx.x) % L, group = static_cast<int>(threadIdx.x) / L;
  const int own = static_cast<int>(slice) * (L * V) + lane * V;
  const int column = min(own, m.n - V);  // lanes past the last column reread it: the shuffles need them
  const bool writes = own < m.n;
  if (block >= m.chunk_blocks) {
    const int first = static_cast<int>(block - m.chunk_blocks) * (kGroups * kEmptyRows) + group;
    const float zeros[V] = {};
    for (int i = first; i < min(first + kGroups * kEmptyRows, m.empties); i += kGroups)
      if (writes) store_row<T, V>(m.out + static_cast<int64_t>(m.empty[i]) * m.n + own, zeros);
    return;
  }
  const int chunk = static_cast<int>(block) * kGroups + group;
  const int begin = m.begins[min(chunk, m.chunks)], size = m.begins[min(chunk + 1, m.chunks)] - begin;
  const int most = static_cast<int>(largest_of_warp(static_cast<unsigned>(size)));
  const char* const dense = reinterpret_cast<const char*>(m.dense + column);
  ChunkEntry batch = chunk_entry(m, begin, lane, size);
  float sums[V] = {};
#pragma unroll 1
  for (int done = 0; done < most; done += L) {
    const ChunkEntry next = chunk_entry(m, begin, done + L + lane, size);
    const unsigned ends = __ballot_sync(kAll, batch.end >= 0);
#pragma unroll 1
    for (int j = 0; j < L; j += U) {
      if (L > U && done + j >= most) break;
      Words<T, V> words[U];
      float value[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const auto row = static_cast<uint32_t>(__shfl_sync(kAll, batch.column, j + u, L));
        words[u] =
            load_vector<T, V>(reinterpret_cast<const T*>(dense + static_cast<uint64_t>(row) * m.dense_row_bytes));
        value[u] = __shfl_sync(kAll, batch.value, j + u, L);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        float numbers[V];
        unpack(words[u], numbers);
#pragma unroll
        for (int v = 0; v < V; ++v) sums[v] += value[u] * numbers[v];
        if (!(ends & (kFirsts << (j + u)))) continue;  // no group's row ends here
        const int end = __shfl_sync(kAll, batch.end, j + u, L);
        write_end<T, V>(m, end, own, writes && end >= 0, sums);
#pragma unroll
        for (int v = 0; v < V; ++v) sums[v] = end >= 0 ? 0 : sums[v];
      }
    }
    batch = next;
  }
}

// A block adds the pieces of a long row, four columns per lane: each group of L lanes its pieces, then the groups in
// order.
template <class T, int L>
__global__ void __launch_bounds__(kSparseThreads) spmm_pieces_kernel(const __grid_constant__ ChunkArgs<T> m) {
  constexpr int kGroups = kSparseThreads / L;
  __shared__ float4 found[kGroups][L];
  const int lane = static_cast<int>(threadIdx.x) % L, group = static_cast<int>(threadIdx.x) / L;
  const int column = static_cast<int>(blockIdx.y) * (L * 4) + lane * 4;
  // safe before the wait: written before the chunk kernel, which waited for it
  const int* const cut = m.cut + blockIdx.x * 3;
  const int row = cut[0], first = cut[1], count = cut[2];
  ptx::griddepcontrol_wait();
  float4 sum = {};
  const auto add = [&](const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; };
  if (column < m.n) {
#pragma unroll 4
    for (int i = group; i < count; i += kGroups)
      add(*reinterpret_cast<const float4*>(m.partial + static_cast<int64_t>(first + i) * m.n + column));
  }
  found[group][lane] = sum;
  __syncthreads();
  if (group > 0 || column >= m.n) return;
  for (int g = 1; g < min(kGroups, count); ++g) add(found[g][lane]);
  const float numbers[4] = {sum.x, sum.y, sum.z, sum.w};
  store_row<T, 4>(m.out + static_cast<int64_t>(row) * m.n + column, numbers);
}

}  // namespace matmuls
