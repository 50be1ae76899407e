// Includes the file LOOPS once per instruction set, each time in its own namespace. Include it after instruction_sets.h
// and inside a namespace. No include guard: each .cpp includes it with its own LOOPS.

#ifdef MATMULS_X86_TARGETS
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#define ROWS_VECTOR_BYTES 64
#include LOOPS
#undef ROWS_VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define ROWS_VECTOR_BYTES 32
#include LOOPS
#undef ROWS_VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options

// For x86-64 before 2013. With -O3 these loops took as long to compile as those of a machine of today.
#pragma GCC push_options
#pragma GCC optimize("O1")
#endif

namespace baseline {
#define ROWS_VECTOR_BYTES 16
#include LOOPS
#undef ROWS_VECTOR_BYTES
}  // namespace baseline

#ifdef MATMULS_X86_TARGETS
#pragma GCC pop_options
#else
namespace avx512 = baseline;
namespace avx2 = baseline;
#endif
#undef LOOPS
