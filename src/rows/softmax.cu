// softmax and its scaled, masked and causal form: y = exp(z - max z) / sum exp(z - max z) along one dimension, with z =
// scale * x + mask, in place or into another tensor.
//
// A masked column gets 0; a row whose columns are all masked is 0; NaN propagates as in torch.softmax. Statistics and
// the scale are float32 (float64 for float64). Each element is read once and written once.
//
// This file names the GPU code; rows/launch_rows.cuh launches a kernel of rows/kernels/, such as nearly_even.cuh, and
// rows/softmax_ops.cpp has the CPU and the operators.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>

#include <cmath>

#include "glue/handles.h"
#include "rows/launch_rows.cuh"
#include "rows/softmax.h"
#include "rows/softmax_math.cuh"

namespace matmuls {
namespace {

using at::Tensor;
using Call = SoftmaxCall;

template <class T, class Mask, bool holds, bool anywhere>
Softmax<T, Mask, holds, anywhere> operation(std::type_identity<Softmax<T, Mask, holds, anywhere>>, const Call& c,
                                            const SoftmaxRows& rows) {
  using Op = Softmax<T, Mask, holds, anywhere>;
  return {decltype(Op::index)(rows.data),
          RowIndex<2, 3>(rows.mask_rows),
          c.x.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          c.mask.defined() ? static_cast<const char*>(c.mask.const_data_ptr()) : nullptr,
          rows.data.column_strides[0],
          rows.data.column_strides[1],
          rows.mask_rows.column_strides[0],
          c.mask.defined() ? static_cast<int>(c.mask.element_size()) : 0,
          c.kind,
          c.causal,
          static_cast<arithmetic_t<T>>(c.scale)};
}

template <class T, bool bytes, bool ends, bool anywhere>
PackedSoftmax<T, bytes, ends, anywhere> operation(std::type_identity<PackedSoftmax<T, bytes, ends, anywhere>>,
                                                  const Call& c, const SoftmaxRows& rows) {
  return {RowIndex<2, 3>(rows.data),
          RowIndex<2, 3>(rows.mask_rows),
          c.x.const_data_ptr<T>(),
          c.out.mutable_data_ptr<T>(),
          bytes ? static_cast<const unsigned char*>(c.mask.const_data_ptr()) : nullptr,
          c.causal,
          c.scale < 0,
          static_cast<float>(std::abs(c.scale)) * kLog2e};
}

template <class T>
struct Kernels {
  template <class Use>
  static void with(const RowFacts& f, const RowChoice& c, const Use& use) {
    if (c.form == RowForm::in_registers) return with_kernel<Softmax<T, NoMask, true>>(c, use);
    if (c.form == RowForm::computed_twice) return with_kernel<Softmax<T, NoMask, false>>(c, use);
    if constexpr (sizeof(T) == 2) {
      if (c.form == RowForm::half2) {
        if (f.mask == MaskKind::none) return half2<false, true>(c, use);
        return f.causal ? half2<true, true>(c, use) : half2<true, false>(c, use);
      }
    }
    if constexpr (sizeof(T) <= 4) {
      using Other = std::conditional_t<sizeof(T) == 2, float, uint8_t>;
      if (c.form == RowForm::vector_mask)
        return f.mask == MaskKind::same ? vector_mask<T>(c, use) : vector_mask<Other>(c, use);
    }
    with_kernel<Softmax<T, AnyMask>>(c, use);
  }

 private:
  // Byte masks, causal rows and both, in packed 16-bit arithmetic.
  template <bool bytes, bool ends, class Use>
  static void half2(const RowChoice& c, const Use& use) {
    c.unaligned ? with_kernel_of<PackedSoftmax<T, bytes, ends, bytes>, true>(c, use)
                : with_kernel_of<PackedSoftmax<T, bytes, ends>, false>(c, use);
  }
  // Vectors of a mask of type Mask.
  template <class Mask, class Use>
  static void vector_mask(const RowChoice& c, const Use& use) {
    c.unaligned ? with_kernel_of<Softmax<T, Mask, true, true>, true>(c, use)
                : with_kernel_of<Softmax<T, Mask>, false>(c, use);
  }
};

}  // namespace

void run_cuda(const Call& c) {
  if (c.out.numel() == 0) return;
  const OperationGuard guard(c.op, c.x);
  const auto rows = rows_of_call(c);
  RowFacts facts = facts_of_call(c, rows);
  facts.device = row_device();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    launch_rows<Kernels<scalar_t>>(facts, [&]<class Op>() { return operation(std::type_identity<Op>(), c, rows); });
  });
}

}  // namespace matmuls
#endif
