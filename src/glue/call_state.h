// What decides how a call is computed, apart from the numbers in its tensors: the switches, and each tensor's form and
// place. Whatever repeats a call without choosing again (prepared calls, recordings of Triton's kernels, CUDA graphs)
// compares these, so that all of them see the same changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace matmuls {

// The number of the set of kernels that is off now (custom_mm/kernel_switch.py); 0: none.
inline std::atomic<int64_t> kernels_off{0};

// torch's and our switches, by which kernels are chosen. Those of the dispatcher (autocast, gradients, transforms) are
// not among them: a call below the dispatcher does not depend on them.
struct Switches {
  std::array<uint64_t, 2> words;

  static Switches now();
  bool operator==(const Switches&) const = default;
};

// A tensor apart from its address and its numbers.
struct TensorForm {
  c10::DispatchKeySet keys;
  at::ScalarType dtype;
  at::Device device;
  at::DimVector sizes, strides;

  explicit TensorForm(const at::Tensor& t)
      : keys(t.key_set()), dtype(t.scalar_type()), device(t.device()), sizes(t.sizes()), strides(t.strides()) {}
  bool is_of(const at::Tensor& t) const {
    return t.key_set() == keys && t.scalar_type() == dtype && t.device() == device && t.sizes() == sizes &&
           t.strides() == strides;
  }
  // The same facts as numbers, for a key.
  template <class Numbers>
  static void append(const at::Tensor& t, Numbers& to) {
    for (const int64_t fact :
         {t.dim(), static_cast<int64_t>(t.key_set().raw_repr()), static_cast<int64_t>(t.scalar_type()),
          static_cast<int64_t>(t.device().type()), int64_t{t.device().index()}})
      to.push_back(fact);
    to.append(t.sizes().begin(), t.sizes().end());
    to.append(t.strides().begin(), t.strides().end());
  }
};

// A tensor apart from its numbers.
struct TensorState {
  TensorForm form;
  const void* data;

  explicit TensorState(const at::Tensor& t) : form(t), data(t.const_data_ptr()) {}
  bool is_of(const at::Tensor& t) const { return t.const_data_ptr() == data && form.is_of(t); }
};

}  // namespace matmuls
