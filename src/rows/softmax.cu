// softmax and its scaled, masked and causal form: y = exp(z - max z) / sum exp(z - max z) along one dimension, with z =
// scale * x + mask, in place or into another tensor.
//
// A masked column gets 0; a row whose columns are all masked is 0; NaN propagates as in torch.softmax. Statistics and
// the scale are float32 (float64 for float64). Each element is read once and written once.
//
// This file launches the GPU kernels; rows/softmax_ops.cpp has the CPU and the operators.
#ifdef __CUDACC__
#include <ATen/Dispatch.h>

#include <cmath>

#include "glue/handles.h"
#include "rows/kernels/even_rows.cuh"
#include "rows/kernels/nearly_even.cuh"
#include "rows/kernels/staged.cuh"
#include "rows/kernels/two_pass.cuh"
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

// Hands the kernel of a choice to `use`: one of those that are compiled for softmax without a mask.
template <class T, bool holds, class Use>
void with_plain(const RowChoice& c, const Use& use) {
  using Op = Softmax<T, NoMask, holds>;
  if constexpr (sizeof(T) <= 4) {
    if constexpr (holds) {
      if (c.kernel == RowKernel::staged || c.kernel == RowKernel::direct) return with_staged<Op>(c, use);
    } else {
      if (c.kernel == RowKernel::nearly_even)
        return c.unaligned ? with_nearly_even<Op, true, 5, 6, 7, 8>(c, use)
                           : with_nearly_even<Op, false, 5, 6, 7, 8>(c, use);
      if (c.kernel == RowKernel::two_pass) return with_two_pass<Op>(c, use);
    }
  }
  with_general<Op>(c, use);
}

// The same for any mask.
template <class T, class Use>
void with_any_mask(const RowChoice& c, const Use& use) {
  using Op = Softmax<T, AnyMask>;
  if constexpr (sizeof(T) <= 4) {
    if (c.kernel == RowKernel::staged || c.kernel == RowKernel::direct)
      return with_staged<Op, kStagedMaskedColumns>(c, use);
  }
  with_general<Op>(c, use);
}

// The same for byte masks, causal rows and both, in packed 16-bit arithmetic.
template <class T, bool bytes, bool ends, class Use>
void with_half2(const RowChoice& c, const Use& use) {
  if (c.unaligned) {
    using Op = PackedSoftmax<T, bytes, ends, bytes>;
    return c.kernel == RowKernel::even_rows ? with_unaligned_warps<Op>(c, use)
                                            : with_nearly_even<Op, true, 5, 6, 7, 8>(c, use);
  }
  using Op = PackedSoftmax<T, bytes, ends>;
  if (c.kernel == RowKernel::nearly_even) return with_nearly_even<Op, false, 5, 6, 7, 8>(c, use);
  if (c.kernel != RowKernel::even_rows) return with_general<Op>(c, use);
  if (with_even_rows<Op, ends ? 4 : 2, ends ? 4 : 8, true>(c, use)) return;
  if constexpr (ends) {
    if (with_even_rows<Op, 4, 32, true>(c, use) || with_even_rows<Op, 4, 16, true>(c, use)) return;
    if (with_even_rows<Op, 5, 32, false>(c, use) || with_even_rows<Op, 6, 32, false>(c, use) ||
        with_even_rows<Op, 7, 32, false>(c, use) || with_even_rows<Op, 8, 32, false>(c, use))
      return;
  }
  not_compiled(c);
}

// The same for vectors of a mask of type Mask.
template <class T, class Mask, class Use>
void with_vector_mask(const RowChoice& c, const Use& use) {
  constexpr int kMost = sizeof(T) == 4 ? 8 : 6;  // vectors of 16-bit elements take twice the registers
  if (c.unaligned) {
    using Op = Softmax<T, Mask, true, true>;
    if constexpr (sizeof(T) == 2)
      if (c.kernel == RowKernel::even_rows) return with_unaligned_warps<Op>(c, use);
    return with_nearly_even<Op, true, 3, 4, 5, kMost>(c, use);
  }
  using Op = Softmax<T, Mask>;
  c.kernel == RowKernel::nearly_even ? with_nearly_even<Op, false, 3, 4, 5, kMost>(c, use) : with_general<Op>(c, use);
}

template <class T, class Use>
void with_kernel(const RowFacts& f, const RowChoice& c, const Use& use) {
  if (c.form == RowForm::in_registers) return with_plain<T, true>(c, use);
  if (c.form == RowForm::computed_twice) return with_plain<T, false>(c, use);
  if constexpr (sizeof(T) == 2) {
    if (c.form == RowForm::half2) {
      if (f.mask == MaskKind::none) return with_half2<T, false, true>(c, use);
      return f.causal ? with_half2<T, true, true>(c, use) : with_half2<T, true, false>(c, use);
    }
  }
  if constexpr (sizeof(T) <= 4) {
    using Other = std::conditional_t<sizeof(T) == 2, float, uint8_t>;
    if (c.form == RowForm::vector_mask)
      return f.mask == MaskKind::same ? with_vector_mask<T, T>(c, use) : with_vector_mask<T, Other>(c, use);
  }
  with_any_mask<T>(c, use);
}

template <class T>
bool has_room(const RowFacts& f, const RowChoice& c) {
  bool room = false;
  with_kernel<T>(f, c, AskRoom{c, room});
  return room;
}

}  // namespace

void run_cuda(const Call& c) {
  if (c.out.numel() == 0) return;
  const OperationGuard guard(c.op, c.x);
  const auto rows = rows_of_call(c);
  RowFacts facts = facts_of_call(c, rows);
  facts.device = row_device();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, c.x.scalar_type(), "softmax", [&] {
    const RowChoice choice = choose(facts, has_room<scalar_t>);
    const auto make = [&]<class Op>() { return operation(std::type_identity<Op>(), c, rows); };
    with_kernel<scalar_t>(facts, choice, LaunchRows{facts, choice, make, kNothingToPrepare});
  });
}

}  // namespace matmuls
#endif
