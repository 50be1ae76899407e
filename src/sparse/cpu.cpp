// The functions of cpu.h: loops compiled for three instruction sets, chosen at run time.
#include "sparse/cpu.h"

#include <cmath>

#include "cpu/instruction_sets.h"

namespace matmuls {
namespace {

// The functions of one instruction set, for one type.
template <class T, class I>
struct Kernels {
  decltype(&spmm_rows<T, I>) rows;
  decltype(&spmm_piece<T, I>) piece;
  decltype(&spmm_finish<T, I>) finish;
  decltype(&extremum_rows<T, I>) extremum;
  decltype(&sddmm_nonzeros<T, I>) sddmm;
  decltype(&are_finite<T>) finite;
  decltype(&lie_within<I>) within;
  decltype(&never_decrease<I>) rise;
};

#define LOOPS "sparse/cpu_loops.h"
#include "cpu/each_instruction_set.h"

template <class T, class I>
const Kernels<T, I>& kernels() {
  static const Kernels<T, I> best =
      for_this_machine(avx512::kKernels<T, I>, avx2::kKernels<T, I>, baseline::kKernels<T, I>);
  return best;
}

}  // namespace

template <class T, class I>
void spmm_rows(const Spmm<T, I>& m, int64_t begin, int64_t end) {
  kernels<T, I>().rows(m, begin, end);
}
template <class T, class I>
void complex_rows(const Spmm<T, I>& m, int64_t begin, int64_t end) {
  static const auto best =
      for_this_machine(avx512::complex_rows<T, I>, avx2::complex_rows<T, I>, baseline::complex_rows<T, I>);
  best(m, begin, end);
}
template <class T, class I>
void spmm_piece(const Spmm<T, I>& m, int64_t begin, int64_t end, arithmetic_t<T>* sums) {
  kernels<T, I>().piece(m, begin, end, sums);
}
template <class T, class I>
void spmm_finish(const Spmm<T, I>& m, int64_t row, const arithmetic_t<T>* sums) {
  kernels<T, I>().finish(m, row, sums);
}
template <class T, class I>
void extremum_rows(const Spmm<T, I>& m, bool largest, int64_t begin, int64_t end, I* arg) {
  kernels<T, I>().extremum(m, largest, begin, end, arg);
}
template <class T, class I>
void sddmm_nonzeros(const Sddmm<T, I>& m, int64_t row, int64_t begin, int64_t end) {
  kernels<T, I>().sddmm(m, row, begin, end);
}

template <class T>
bool are_finite(const T* numbers, int64_t count) {
  return kernels<T, int32_t>().finite(numbers, count);
}
template bool are_finite(const float*, int64_t);
template bool are_finite(const double*, int64_t);

template <class I>
bool lie_within(const I* indices, int64_t count, I last) {
  return kernels<float, I>().within(indices, count, last);
}
template <class I>
bool never_decrease(const I* offsets, int64_t count) {
  return kernels<float, I>().rise(offsets, count);
}
template bool never_decrease(const int32_t*, int64_t);
template bool never_decrease(const int64_t*, int64_t);
template bool lie_within(const int32_t*, int64_t, int32_t);
template bool lie_within(const int64_t*, int64_t, int64_t);

#define SPARSE_INSTANTIATE_FOR(T, I)                                               \
  template void spmm_rows(const Spmm<T, I>&, int64_t, int64_t);                    \
  template void spmm_piece(const Spmm<T, I>&, int64_t, int64_t, arithmetic_t<T>*); \
  template void spmm_finish(const Spmm<T, I>&, int64_t, const arithmetic_t<T>*);   \
  template void extremum_rows(const Spmm<T, I>&, bool, int64_t, int64_t, I*);      \
  template void sddmm_nonzeros(const Sddmm<T, I>&, int64_t, int64_t, int64_t);
#define SPARSE_INSTANTIATE(T)        \
  SPARSE_INSTANTIATE_FOR(T, int32_t) \
  SPARSE_INSTANTIATE_FOR(T, int64_t)
SPARSE_INSTANTIATE(double)
SPARSE_INSTANTIATE(float)
SPARSE_INSTANTIATE(c10::Half)
SPARSE_INSTANTIATE(c10::BFloat16)
template void complex_rows(const Spmm<double, int32_t>&, int64_t, int64_t);
template void complex_rows(const Spmm<double, int64_t>&, int64_t, int64_t);
template void complex_rows(const Spmm<float, int32_t>&, int64_t, int64_t);
template void complex_rows(const Spmm<float, int64_t>&, int64_t, int64_t);
#undef SPARSE_INSTANTIATE
#undef SPARSE_INSTANTIATE_FOR

}  // namespace matmuls
