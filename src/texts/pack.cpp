// pack_padded and unpack_padded (pack.h): their checks.
#include "texts/pack.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>

#include <limits>
#ifdef MATMULS_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace matmuls {
namespace {

using at::Tensor;

constexpr const char *kPack = "pack_padded", *kUnpack = "unpack_padded";

texts::Strided strided(const char* name, const Tensor& t, const Tensor& ids) {
  TORCH_CHECK(t.dim() == 2 && t.sizes() == ids.sizes() && t.device() == ids.device(), kPack, ": expected ", name,
              " of input_ids' shape ", ids.sizes(), " on ", ids.device(), ", got ", t.sizes(), " on ", t.device());
  expect_memory(kPack, name, t);
  return {t.const_data_ptr(), t.stride(0), t.stride(1)};
}

template <class T>
T* target(const char* op, const char* name, const Tensor& t, at::Device device, int64_t least) {
  constexpr auto dtype = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK(t.device() == device && t.is_contiguous() && t.numel() >= least && t.scalar_type() == dtype, op,
              ": expected ", name, " contiguous, in ", dtype, ", of at least ", least, " elements on ", device,
              ", got ", t.sizes(), " in ", t.scalar_type(), " on ", t.device());
  return t.mutable_data_ptr<T>();
}

}  // namespace

void pack_padded(const Tensor& ids, const OptionalTensor& mask, const OptionalTensor& types, int64_t padding,
                 const Tensor& packed, const Tensor& positions, const OptionalTensor& packed_types, const Tensor& place,
                 const Tensor& starts) {
  TORCH_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.numel() > 0, kPack,
              ": expected input_ids [B, S] in Long, not empty, got ", ids.sizes(), " in ", ids.scalar_type());
  expect_memory(kPack, "input_ids", ids);
  TORCH_CHECK(!types || types->scalar_type() == at::kLong, kPack, ": expected token_type_ids in Long, got ",
              types->scalar_type());
#ifdef MATMULS_CUDA
  const c10::cuda::OptionalCUDAGuard guard(ids.is_cuda() ? std::optional(ids.device()) : std::nullopt);
#endif
  Tensor seen = mask.value_or(Tensor());
  if (seen.defined() && (!at::isIntegralType(seen.scalar_type(), true) || seen.element_size() == 2)) seen = seen.ne(0);
  const int64_t count = ids.numel(), size = packed.numel(), per_text = seen.defined() ? 2 : 1;
  const int64_t room = (starts.numel() / 2 - 1) / per_text;
  TORCH_CHECK(size >= count && room >= ids.size(0) && room <= texts::kMostTexts && size <= texts::kMostTokens, kPack,
              ": expected room for the tokens and texts of ", ids.sizes(), ", and at most ", texts::kMostTokens,
              " tokens and ", texts::kMostTexts, " texts, got room for ", size, " tokens and ", room, " texts");
  texts::Padded in{};
  in.ids = strided("input_ids", ids, ids);
  if (seen.defined()) {
    in.mask = strided("attention_mask", seen, ids);
    in.mask_bytes = static_cast<int>(seen.element_size());
  }
  if (types) in.types = strided("token_type_ids", *types, ids);
  in.batch = static_cast<int>(ids.size(0)), in.length = static_cast<int>(ids.size(1)), in.padding = padding;
  texts::Packed out{};
  const at::Device device = ids.device();
  out.ids = target<int64_t>(kPack, "the packed input_ids", packed, device, size);
  out.positions = target<int64_t>(kPack, "the positions", positions, device, size);
  if (packed_types) out.types = target<int64_t>(kPack, "the packed token_type_ids", *packed_types, device, size);
  out.place = target<int32_t>(kPack, "place", place, device, count);
  out.queries = target<int32_t>(kPack, "starts", starts, device, 2 * (1 + per_text * room));
  out.keys = out.queries + starts.numel() / 2;
  out.size = static_cast<int>(size), out.texts = static_cast<int>(room), out.pairs = per_text == 2;
  expect_gpu(kPack, "input_ids", ids);
#ifdef MATMULS_CUDA
  texts::pack_on_gpu(in, out);
#endif
}

Tensor unpack_padded(const Tensor& states, const Tensor& place, int64_t batch, int64_t length) {
  const int64_t width = states.dim() == 2 ? states.size(1) : 0;
  expect_memory(kUnpack, "states", states);
  TORCH_CHECK(states.is_contiguous() && width > 0 && batch > 0 && length > 0 &&
                  batch <= std::numeric_limits<int32_t>::max() / length && !states.is_conj() && !states.is_neg(),
              kUnpack, ": expected contiguous states [T, width] and positive sizes, got ", states.sizes(), " in ",
              states.scalar_type(), ", batch ", batch, " and length ", length);
  [[maybe_unused]] const int32_t* at = target<int32_t>(kUnpack, "place", place, states.device(), batch * length);
  expect_gpu(kUnpack, "states", states);
  const Tensor out = at::empty({batch, length, width}, states.options());
#ifdef MATMULS_CUDA
  const c10::cuda::CUDAGuard guard(states.device());
  texts::unpack_on_gpu(states, at, out);
#endif
  return out;
}

}  // namespace matmuls
