// embed (embed.h): its checks.
#include "texts/embed.h"

#include <ATen/ops/empty.h>

#ifdef MATMULS_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char* kEmbed = "embed";

const int64_t* indices(const char* name, const Tensor& ids, const Tensor& like) {
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.is_contiguous() && ids.sizes() == like.sizes() &&
                  ids.device() == like.device(),
              kEmbed, ": expected ", name, " contiguous, in Long, of shape ", like.sizes(), " on ", like.device(),
              ", got ", ids.sizes(), " in ", ids.scalar_type(), " on ", ids.device());
  return ids.const_data_ptr<int64_t>();
}

// A matrix of rows [count, D], or a vector [D], like words.
const void* parameter(const char* name, const Tensor& t, const Tensor& words, int64_t dims) {
  TORCH_CHECK(t.dim() == dims && t.size(-1) == words.size(1) && t.numel() > 0 && t.is_contiguous() &&
                  t.scalar_type() == words.scalar_type() && t.device() == words.device(),
              kEmbed, ": expected ", name, " contiguous, of ", dims, " dimensions, the last of ", words.size(1),
              ", in ", words.scalar_type(), " on ", words.device(), ", got ", t.sizes(), " in ", t.scalar_type(),
              " on ", t.device());
  return t.const_data_ptr();
}

}  // namespace

Tensor embed(const Tensor& ids, const Tensor& words, const Tensor& position_ids, const Tensor& positions,
             const OptionalTensor& type_ids, const Tensor& types, const Tensor& weight, const Tensor& bias,
             double eps) {
  TORCH_CHECK(words.dim() == 2 && is_real(words.scalar_type()), kEmbed,
              ": expected words [V, D] in a floating-point dtype, got ", words.sizes(), " in ", words.scalar_type());
  expect_memory(kEmbed, "words", words);
  expect_memory(kEmbed, "ids", ids);
  TORCH_CHECK(ids.device() == words.device(), kEmbed, ": expected ids on ", words.device(), ", got ", ids.device());
  texts::Embedding e{};
  e.tables[0] = {parameter("words", words, words, 2), indices("ids", ids, ids), words.size(0)};
  e.tables[1] = {parameter("types", types, words, 2), type_ids ? indices("type_ids", *type_ids, ids) : nullptr,
                 types.size(0)};
  e.tables[2] = {parameter("positions", positions, words, 2), indices("position_ids", position_ids, ids),
                 positions.size(0)};
  e.weight = parameter("weight", weight, words, 1), e.bias = parameter("bias", bias, words, 1);
  e.tokens = ids.numel(), e.columns = words.size(1), e.eps = eps;
  expect_gpu(kEmbed, "ids", ids);
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(e.columns);
#ifdef MATMULS_CUDA
  const c10::cuda::OptionalCUDAGuard guard(ids.is_cuda() ? std::optional(ids.device()) : std::nullopt);
#endif
  const Tensor out = at::empty(sizes, words.options());
  if (out.numel() == 0) return out;
  e.out = out.mutable_data_ptr();
#ifdef MATMULS_CUDA
  texts::embed_on_gpu(e, words.scalar_type());
#endif
  return out;
}

}  // namespace matmuls
