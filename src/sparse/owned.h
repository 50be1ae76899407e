// Tensors that own what an operator keeps between its calls, so that it is passed through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "glue/checks.h"

namespace matmuls {

template <class S>
struct Owner {
  std::unique_ptr<S> kept;
  at::Tensor address;  // makes the storage one of the device

  static void destroy(void* self) { delete static_cast<Owner*>(self); }
};

// An empty tensor, on the device of `like`, whose storage owns `kept`.
template <class S>
at::Tensor tensor_with(std::unique_ptr<S> kept, const at::Tensor& like) {
  const at::Tensor address = empty({1}, like.options().dtype(at::kByte));
  auto owner = std::make_unique<Owner<S>>(Owner<S>{std::move(kept), address});
  c10::DataPtr data(address.data_ptr(), owner.get(), &Owner<S>::destroy, address.device());
  (void)owner.release();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 1, std::move(data), nullptr, false);
  return empty({0}, address.options()).set_(storage, 0, {0}, {1});
}

// The object that the tensor owns; null if it owns none, as a clone or an unpickled tensor.
template <class S>
S* owned_by(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return nullptr;
  auto* const owner = t.storage().data_ptr().template cast_context<Owner<S>>(&Owner<S>::destroy);
  return owner == nullptr ? nullptr : owner->kept.get();
}

}  // namespace matmuls
