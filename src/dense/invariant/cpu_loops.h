// Loops of product_cpu.cpp, which includes this file once per instruction set, each time in another namespace and with
// another ROWS_VECTOR_BYTES: no include guard and no other #include (cpu/vectors.h says why).

#include "cpu/vectors.h"

constexpr int kTileRows = 6;
constexpr int kTileVectors = ROWS_VECTOR_BYTES == 64 ? 4 : 2;  // sums of a tile: 24 of 32 registers, or 12 of 16
template <class A>
constexpr int kPanel = kTileVectors * kLanes<A>;  // columns of a tile

// panel [k, kPanel] <- `count` columns of b, and zeros. If columns are the strided side, few are read at a time, so
// that their lines stay in the cache.
template <class A>
void pack(const A* b, int64_t step_k, int64_t step_n, int64_t k, int count, A* panel) {
  constexpr int64_t kPart = 64;
  constexpr int kFew = kPanel<A> < 8 ? kPanel<A> : 8;
  static_assert(kPanel<A> % kFew == 0);
  for (int64_t begin = 0; begin < k; begin += kPart) {
    const int64_t end = begin + kPart < k ? begin + kPart : k;
    for (int n = 0; n < kPanel<A>; n += kFew)
      for (int64_t i = begin; i < end; ++i)
        for (int each = n; each < n + kFew; ++each)
          panel[i * kPanel<A> + each] = each < count ? b[i * step_k + each * step_n] : A(0);
  }
}

// Columns [0, count) of rows [begin, end) of out = a @ panel + bias, for contiguous a [_, k]; bias may be null. The
// last tile repeats its last row, so that every row passes through the same instructions.
template <class T, class A = arithmetic_t<T>>
void multiply(const A* a, const A* panel, const T* bias, T* out, int64_t out_stride, int64_t begin, int64_t end,
              int64_t k, int count) {
  for (int64_t first = begin; first < end; first += kTileRows) {
    const A* row[kTileRows];
    for (int r = 0; r < kTileRows; ++r) row[r] = a + (first + r < end ? first + r : end - 1) * k;
    Vec<A> sums[kTileRows][kTileVectors] = {};
    for (int64_t i = 0; i < k; ++i) {
      Vec<A> columns[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) columns[v] = load<A>(panel + i * kPanel<A> + v * kLanes<A>, kLanes<A>);
      for (int r = 0; r < kTileRows; ++r)
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] += splat(row[r][i]) * columns[v];
    }
    for (int v = 0; v < kTileVectors; ++v) {
      const int c = v * kLanes<A>, here = count - c < kLanes<A> ? count - c : kLanes<A>;
      if (here <= 0) break;
      const Vec<A> added = bias != nullptr ? load<A>(bias + c, here) : Vec<A>{};
      for (int r = 0; r < kTileRows && first + r < end; ++r)
        store<A>(out + (first + r) * out_stride + c, bias != nullptr ? sums[r][v] + added : sums[r][v], here);
    }
  }
}

template <class T>
constexpr Kernels<T> kKernels{kPanel<arithmetic_t<T>>, pack<arithmetic_t<T>>, multiply<T>};
