// Facts about an operation on rows that decide how its kernels are compiled and configured: plain numbers, shared by
// the kernels (nvcc) and by the host code that chooses one of them (rows/choose.h).
#pragma once

#include <algorithm>
#include <climits>
#include <span>

namespace matmuls {

// The threads that share a row: some lanes of a warp, a block, or a cluster of blocks.
enum class Scope { warp, block, cluster };

constexpr int kMaxRanks = 16;  // blocks per cluster; more than 8 need cudaFuncAttributeNonPortableClusterSizeAllowed

// Threads per block at most, of the persistent kernel.
constexpr int persistent_threads(Scope scope) {
  return scope == Scope::warp ? 256 : scope == Scope::block ? 512 : 1024;
}

// An instance of even_rows: vectors of each input per thread, threads per row, and whether every thread has all of its
// vectors.
struct EvenRows {
  int vectors, threads;
  bool exact;
};

// Counts of vectors are of each input, per thread.
struct RowTraits {
  int element;               // bytes of an element in memory
  int inputs, constants;     // tensors that a row is read from; rows of elements that all rows share (weight, bias)
  int state;                 // bytes of what a row is folded into
  int vectors = 4;           // that a thread holds
  int long_vectors = 4;      // that a thread holds in rows that need more
  int held_vectors = 4;      // that fit in registers
  int row_most;              // threads per row above which the kernel is persistent; 0: long rows only
  int threads_per_sm;        // that should be resident
  int most_threads;          // per block of the persistent kernel
  bool number = false;       // each row has its own number, which write needs
  bool column_sums = false;  // write adds to two sums for each column, over the rows
  bool in_clusters = true;   // a cluster holds rows that are too long for a block; otherwise they are read twice
  bool whole_rows = false;   // only aligned rows of whole vectors are supported
  bool keeps_nothing;        // fold leaves nothing in registers for write, which reads the elements again
  // The kernels that are compiled for it besides the general ones (rows/kernel_sizes.h).
  std::span<const EvenRows> even = {};    // even_rows of aligned rows
  std::span<const int> nearly_even = {};  // nearly_even: vectors
  bool unaligned_warps = false;           // even_rows of unaligned rows
  bool two_pass = false;
  bool unaligned_cluster = false;  // cluster of unaligned rows
  int staged = 0;                  // staged and direct, of at most as many columns

  constexpr int arithmetic() const { return element == 8 ? 8 : 4; }  // bytes of a number in arithmetic
  constexpr int elements_of_vector() const { return 16 / element; }
  // Most vectors per thread of the one_pass and reread kernels. `elements`: of one vector; 1: no vector accesses.
  constexpr int most_vectors(int elements) const { return elements == 1 ? 4 : vectors; }

  // True if the operation is for long rows only.
  constexpr bool is_long() const { return row_most == 0 && !column_sums; }
  // True if the kernel is persistent for rows of any length: for sums over the rows, and for the constants of unaligned
  // rows, which are loaded once for all rows.
  constexpr bool always_persistent(bool unaligned) const { return column_sums || (unaligned && constants > 0); }
  // True if a cluster shares long rows with few threads of many vectors each.
  constexpr bool few_threads() const {
    return constants == 1 && !column_sums && element == 2 && long_vectors > vectors;
  }
  // True if the threads of a cluster always hold long_vectors. With two constants, a row of 8 vectors per thread fills
  // shared memory and needs half the blocks.
  constexpr bool long_clusters() const { return constants == 2 || few_threads(); }
  // True if a block's threads may hold three vectors instead of four, where a third of the four would be idle. Gradient
  // of 1032, 1152 and 1280 bfloat16 columns: 0.79, 0.91 and 0.93 of the speed of a copy; 0.69, 0.77 and 0.85 with four.
  constexpr bool threes(int elements, bool unaligned) const {
    return elements > 1 && !unaligned && column_sums && vectors == 4;
  }
  // True if the cluster kernel is compiled for aligned rows. Plain softmax has two_pass instead.
  constexpr bool clusters(int elements) const {
    return elements > 1 && inputs == 1 && constants > 0 && !column_sums && element <= 4;
  }
  // Threads per block at most, of the persistent kernel. With unaligned rows (96 registers) blocks of 9 warps fit in
  // pairs.
  constexpr int most_persistent(Scope scope, bool unaligned) const {
    return std::min(persistent_threads(scope), most_threads) + (scope == Scope::block && unaligned ? 32 : 0);
  }
  // True if the persistent kernel is compiled for the scope.
  constexpr bool has_persistent(Scope scope, bool unaligned) const {
    return always_persistent(unaligned) || (scope == Scope::cluster && in_clusters) ||
           (scope == Scope::block && (constants > 0 || (is_long() && in_clusters)));
  }
  // True if the one_pass kernel is compiled for the scope.
  constexpr bool has_one_pass(Scope scope, bool unaligned) const {
    return scope != Scope::cluster && !always_persistent(unaligned) && !is_long();
  }
  // True if one_pass and persistent are compiled for n vectors per thread.
  constexpr bool has_vectors(Scope scope, int elements, bool unaligned, int n) const {
    const int most = most_vectors(elements);
    if (scope == Scope::block) return n == most || (n == 3 && threes(elements, unaligned));
    if (scope == Scope::cluster) return elements > 1 && (n == long_vectors || (n == most && !long_clusters()));
    return n == most || (n < most && n <= 3 && elements > 1 && !unaligned);  // unaligned: one kernel for all short rows
  }
  constexpr bool persistent_unaligned() const { return constants > 0 && element <= 4; }
};

// Rows with any mask: the most columns that are staged.
constexpr int kStagedMaskedColumns = 800;

constexpr int kFives[] = {5}, kThreeToFour[] = {3, 4}, kFiveToEight[] = {5, 6, 7, 8};
// Masked rows by vectors. Those of 16-bit elements take twice the registers.
constexpr int kMasked2[] = {3, 4, 5, 6}, kMasked4[] = {3, 4, 5, 8};
constexpr EvenRows kHalf2[] = {{2, 8, true}};
constexpr EvenRows kHalf2Ends[] = {{4, 4, true},   {4, 16, true},  {4, 32, true}, {5, 32, false},
                                   {6, 32, false}, {7, 32, false}, {8, 32, false}};
constexpr EvenRows kEvenBackward2[] = {{2, 8, true}, {4, 256, true}, {4, 512, true}};
constexpr EvenRows kEvenBackward4[] = {{4, 1024, true}};
constexpr EvenRows kEvenRms[] = {{4, 512, true}};
constexpr EvenRows kThrees[] = {{3, 4, false}, {3, 8, false}, {3, 16, false}, {3, 32, false}};
constexpr EvenRows kEvenLayerNorm[] = {{3, 4, false}, {3, 8, false},  {3, 16, false}, {3, 32, false}, {3, 16, true},
                                       {3, 32, true}, {4, 16, false}, {4, 32, false}, {8, 128, true}, {4, 4, true},
                                       {4, 8, true},  {4, 16, true},  {4, 32, true},  {4, 64, true},  {4, 128, true}};

// in_clusters: long masked rows that are read twice are 3 to 13 % faster than on a cluster (geometric means of 10 to 12
// lengths, H200, benchmarks/results/kernels-cuda.json at commit 583f14f); those without a mask go to two_pass.
// holds: exponentials stay in registers until their sum is known. any: the kind of mask is known at run time only.
constexpr RowTraits softmax_traits(int element, bool masked, bool any, bool holds) {
  return {.element = element,
          .inputs = 1,
          .constants = 0,
          .state = element == 8 ? 16 : 8,
          .row_most = holds ? 512 : 0,
          .threads_per_sm = masked ? 768 : 1024,
          .most_threads = masked ? 512 : 1024,
          .in_clusters = element == 8,
          .whole_rows = !holds || (masked && !any),
          .keeps_nothing = !holds,
          .nearly_even = element == 8     ? std::span<const int>()
                         : !holds         ? std::span<const int>(kFiveToEight)
                         : !masked || any ? std::span<const int>()
                         : element == 2   ? std::span<const int>(kMasked2)
                                          : std::span<const int>(kMasked4),
          .unaligned_warps = masked && !any && element == 2,
          .two_pass = !holds && element <= 4,
          .staged = element == 8 || !holds ? 0
                    : any                  ? kStagedMaskedColumns
                    : masked               ? 0
                                           : INT_MAX};
}
// ends: rows may see fewer than their columns.
constexpr RowTraits softmax_half2_traits(bool ends) {
  return {.element = 2,
          .inputs = 1,
          .constants = 0,
          .state = 8,
          .row_most = 512,
          .threads_per_sm = 1024,
          .most_threads = 512,
          .in_clusters = false,
          .whole_rows = true,
          .keeps_nothing = false,
          .even = ends ? std::span<const EvenRows>(kHalf2Ends) : std::span<const EvenRows>(kHalf2),
          .nearly_even = kFiveToEight,
          .unaligned_warps = true};
}
// few: a thread holds two vectors of each input, else four.
constexpr RowTraits softmax_backward_traits(int element, bool few) {
  const int vectors = few ? 2 : 4;
  return {.element = element,
          .inputs = 2,
          .constants = 0,
          .state = element == 8 ? 8 : 4,
          .vectors = vectors,
          .long_vectors = vectors,
          .held_vectors = vectors,
          .row_most = 512,
          .threads_per_sm = 1024,
          .most_threads = 1024,
          .keeps_nothing = true,
          .even = element == 4           ? std::span<const EvenRows>(kEvenBackward4)
                  : element == 2 && !few ? std::span<const EvenRows>(kEvenBackward2)
                                         : std::span<const EvenRows>(),
          .unaligned_warps = few,
          .two_pass = element == 4 || few,
          .unaligned_cluster = element == 4 || few,
          .staged = element == 4 || few ? INT_MAX : 0};
}
// row_most: rows that need more threads use the persistent kernel, as measured on an H200.
constexpr RowTraits norm_traits(int element, bool rms, bool residual) {
  const int vectors = residual && element == 2 ? 2 : 4, long_vectors = residual || element == 8 ? 4 : 8;
  return {.element = element,
          .inputs = residual ? 2 : 1,
          .constants = rms ? 1 : 2,
          .state = element == 8 ? 24 : 12,
          .vectors = vectors,
          .long_vectors = long_vectors,
          .held_vectors = residual ? vectors : long_vectors,
          .row_most = element == 2 ? (rms ? 256 : 128) : 512,
          .threads_per_sm = 768,
          .most_threads = 512,
          .keeps_nothing = true,
          .even = element == 4   ? std::span<const EvenRows>(kEvenRms, rms && !residual)
                  : element == 8 ? std::span<const EvenRows>()
                  : residual     ? std::span<const EvenRows>(kThrees)
                  : rms          ? std::span<const EvenRows>()
                                 : std::span<const EvenRows>(kEvenLayerNorm),
          .nearly_even = element == 4   ? std::span<const int>(kFives, !residual)
                         : element == 8 ? std::span<const int>()
                         : residual     ? std::span<const int>(kThreeToFour)
                                        : std::span<const int>(kFiveToEight),
          .staged = element == 8 ? 0 : INT_MAX};
}
// Each column has two sums, which take 64 of a thread's 128 registers: the elements stay in shared memory.
constexpr RowTraits norm_backward_traits(int element) {
  return {.element = element,
          .inputs = 2,
          .constants = 1,
          .state = element == 8 ? 16 : 8,
          .long_vectors = element == 4 ? 8 : 4,
          .held_vectors = 2,
          .row_most = 0,
          .threads_per_sm = element == 2 ? 512 : 768,
          .most_threads = 512,
          .number = true,
          .column_sums = true,
          .keeps_nothing = true,
          .staged = element == 8 ? 0 : INT_MAX};
}

}  // namespace matmuls
