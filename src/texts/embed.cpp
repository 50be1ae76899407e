// embed (embed.h): its checks, and the CPU.
#include "texts/embed.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "cpu/threads.h"
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

template <class T>
void embed_on_cpu(const texts::Embedding& e) {
  using F = at::opmath_type<T>;
  const auto *weight = static_cast<const T*>(e.weight), *bias = static_cast<const T*>(e.bias);
  for (const texts::Table& table : e.tables)
    for (int64_t i = 0; table.ids != nullptr && i < e.tokens; ++i)
      TORCH_CHECK_INDEX(table.ids[i] >= 0 && table.ids[i] < table.count, kEmbed, ": expected ids from 0 to ",
                        table.count - 1, ", got ", table.ids[i]);
  parallel_for(0, e.tokens, 16, [&](int64_t begin, int64_t end) {
    std::vector<F> sum(e.columns);
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sum.begin(), sum.end(), F(0));
      for (const texts::Table& table : e.tables) {
        const T* const row = static_cast<const T*>(table.rows) + (table.ids ? table.ids[i] : 0) * e.columns;
        for (int64_t c = 0; c < e.columns; ++c) sum[c] += static_cast<F>(row[c]);
      }
      F mean = 0, squares = 0;
      for (const F x : sum) mean += x;
      mean /= static_cast<F>(e.columns);
      for (const F x : sum) squares += (x - mean) * (x - mean);
      const F scale = F(1) / std::sqrt(squares / static_cast<F>(e.columns) + static_cast<F>(e.eps));
      T* const out = static_cast<T*>(e.out) + i * e.columns;
      for (int64_t c = 0; c < e.columns; ++c)
        out[c] = static_cast<T>((sum[c] - mean) * scale * static_cast<F>(weight[c]) + static_cast<F>(bias[c]));
    }
  });
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
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(e.columns);
#ifdef MATMULS_CUDA
  const c10::cuda::OptionalCUDAGuard guard(ids.is_cuda() ? std::optional(ids.device()) : std::nullopt);
#endif
  const Tensor out = at::empty(sizes, words.options());
  if (out.numel() == 0) return out;
  e.out = out.mutable_data_ptr();
#ifdef MATMULS_CUDA
  if (ids.is_cuda()) {
    texts::embed_on_gpu(e, words.scalar_type());
    return out;
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, words.scalar_type(), kEmbed,
                                  [&] { embed_on_cpu<scalar_t>(e); });
  return out;
}

}  // namespace matmuls
