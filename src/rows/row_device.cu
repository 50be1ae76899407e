// row_device: the limits of the current GPU that decide which row kernel runs.
#ifdef __CUDACC__
#include "gpu/launch.cuh"
#include "rows/facts.h"

namespace matmuls {

RowDevice row_device() {
  const DeviceLimits& limits = device_limits();
  return {limits.multiprocessors, limits.shared_per_block, limits.shared_per_multiprocessor, has_sm90_code()};
}

}  // namespace matmuls
#endif
