// One instance of each kernel template whose code differs between GPU architectures (#if __CUDA_ARCH__), for a check
// that the architectures which no build of .ci/run covers compile. tools/check_archs.py compiles it.
#include "rows/kernels/even_rows.cuh"
#include "rows/kernels/nearly_even.cuh"
#include "rows/kernels/two_pass.cuh"
#include "rows/launch_rows.cuh"
#include "rows/norm_math.cuh"
#include "rows/softmax_half2.cuh"
#include "rows/softmax_math.cuh"

namespace matmuls {

using Half = c10::BFloat16;

// Never called: the kernels that it names are compiled.
const void* each(const RowChoice& c) {
  const void* taken = nullptr;
  const auto use = [&]<RowKernel, auto kernel>() { taken = reinterpret_cast<const void*>(kernel); };
  with_general<Norm<Half, false, false>, 8, false>(c, use);
  with_cluster<Norm<Half, false, false>, false>(c, use);
  with_two_pass<Softmax<Half, NoMask, false>>(c, use);
  use.template
  operator()<RowKernel::nearly_even, nearly_even_kernel<PackedSoftmax<Half, true, false, true>, 8, 5, true>>();
  constexpr int kRows = even_rows_per_block(32, false);
  use.template
  operator()<RowKernel::even_rows, even_rows_kernel<PackedSoftmax<Half, false, true>, 8, 4, 32, kRows, true, false>>();
  return taken;
}

}  // namespace matmuls
