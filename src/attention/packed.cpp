// attend_packed (packed.h): its checks.
#include "attention/packed.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>

namespace matmuls {
namespace packed {
namespace {

using at::Tensor;

constexpr const char* kName = "attend_packed";

void check(const Tensor& q, const Tensor& k, const Tensor& v, int64_t longest, double scale) {
  TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && k.sizes() == v.sizes() && q.size(2) == k.size(2) && k.size(1) > 0 &&
                  q.size(1) % k.size(1) == 0,
              kName, ": expected q [T, H, D], k and v [keys, h, D] with h a divisor of H, got ", q.sizes(), ", ",
              k.sizes(), " and ", v.sizes());
  TORCH_CHECK(is_real(q.scalar_type()), kName, ": expected a floating-point dtype, got ", q.scalar_type());
  check_same(kName, "k", k, q);
  check_same(kName, "v", v, q);
  TORCH_CHECK(longest >= 0 && longest <= INT32_MAX && scale > 0, kName,
              ": expected longest from 0 to 2^31 - 1 and scale > 0, got ", longest, " and ", scale);
}

const int32_t* check_starts(const char* name, const Tensor& starts, const Tensor& q, int64_t count) {
  TORCH_CHECK(starts.dim() == 1 && starts.size(0) == count && count > 0 && count <= INT32_MAX &&
                  starts.scalar_type() == at::kInt && starts.is_contiguous() && starts.device() == q.device(),
              kName, ": expected contiguous ", name, " [segments + 1] in Int on ", q.device(), ", got ", starts.sizes(),
              " in ", starts.scalar_type(), " on ", starts.device());
  return starts.const_data_ptr<int32_t>();
}

#ifdef MATMULS_CUDA
Heads heads_of(const char* name, const Tensor& t) {
  const bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  TORCH_CHECK(aligned && t.stride(2) == 1 && t.stride(1) % 8 == 0 && t.stride(0) % 8 == 0 &&
                  (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16),
              kName, ": expected ", name, " in Half or BFloat16 with heads of adjacent elements at multiples of 16 ",
              "bytes on a GPU, got ", t.scalar_type(), " with strides ", t.strides());
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}
#endif

}  // namespace
}  // namespace packed

at::Tensor attend_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& queries,
                         const at::Tensor& keys, int64_t longest, double scale, int64_t left, int64_t right) {
  packed::check(q, k, v, longest, scale);
  const int64_t most = std::numeric_limits<int32_t>::max() / 4, heads = q.size(1), count = queries.numel();
  TORCH_CHECK(q.size(0) <= most && k.size(0) <= most, packed::kName, ": expected at most 2^29 tokens, got ", q.size(0),
              " and ", k.size(0));
  [[maybe_unused]] packed::Call call{};
  call.queries = packed::check_starts("query_starts", queries, q, count);
  call.keys = packed::check_starts("key_starts", keys, q, count);
  call.segments = static_cast<int>(count - 1), call.heads = static_cast<int>(heads);
  call.sharing = static_cast<int>(heads / k.size(1)), call.longest = static_cast<int>(longest);
  call.left = static_cast<int>(std::clamp<int64_t>(left, -1, most));
  call.right = static_cast<int>(std::clamp<int64_t>(right, -1, most));
  expect_gpu(packed::kName, "q", q);
  const at::Tensor context = at::empty({q.size(0), heads * q.size(2)}, q.options());
#ifdef MATMULS_CUDA
  call.q = packed::heads_of("q", q), call.k = packed::heads_of("k", k), call.v = packed::heads_of("v", v);
  call.context = context.mutable_data_ptr(), call.scale = static_cast<float>(scale * 1.4426950408889634);
  if (context.numel() > 0 && longest > 0 && count > 1) packed::attend_on_gpu(q, call);
#endif
  return context;
}

}  // namespace matmuls
