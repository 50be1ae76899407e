// One instance of each kernel template whose code differs between GPU architectures (#if __CUDA_ARCH__), for a check
// that the architectures which no build of .ci/run covers compile. tools/check_archs.sh compiles it.
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
  with_general_of<Norm<Half, false, false>, 8, false>(c, use);
  with_two_pass<Softmax<Half, NoMask, false>>(c, use);
  with_nearly_even<PackedSoftmax<Half, true, false, true>, true, 5>(c, use);
  with_even_rows<PackedSoftmax<Half, false, true>, 4, 32, true>(c, use);
  return taken;
}

}  // namespace matmuls
