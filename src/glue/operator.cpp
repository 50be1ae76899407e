#include "glue/operator.h"

#include <ATen/autocast_mode.h>

namespace matmuls {

at::ScalarType autocast_dtype(c10::DeviceType device) { return at::autocast::get_autocast_dtype(device); }
at::Tensor autocast_to(at::ScalarType dtype, const at::Tensor& t, c10::DeviceType device) {
  return at::autocast::cached_cast(dtype, t, device);
}

}  // namespace matmuls
