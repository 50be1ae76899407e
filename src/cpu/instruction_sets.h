// Support for compiling a file of loops for several instruction sets (each_instruction_set.h).
#pragma once

#include <c10/macros/Macros.h>

#include <cstddef>
#include <type_traits>
#include <utility>

// Uses GCC's per-function targets; other compilers and processors get the baseline only.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MATMULS_X86_TARGETS 1
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed only to inlined functions

namespace matmuls {

// Returns the best of three versions that this CPU supports.
template <class Kernels>
const Kernels& for_this_machine(const Kernels& avx512, const Kernels& avx2, const Kernels& baseline) {
#ifdef MATMULS_X86_TARGETS
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512) return avx512;
  if (has_avx2) return avx2;
#endif
  return baseline;
}

}  // namespace matmuls
