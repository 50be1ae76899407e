// The in-place products a <- a @ op(b) + bias of one kernel on Hopper, used by inplace_matmul.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace matmuls {

// The kernels of matmul_. Each has the name of its file, without _sm90, or says what it uses; explain() prints it.
enum class InplaceKernel {
  few_rows,   // the result's tiles fit into one wave: a cluster per tile
  panels,     // clusters walk over panels of rows
  workspace,  // panels of rows are copied to a workspace, and cuBLAS writes the product over them
};
constexpr int kInplaceKernels = static_cast<int>(InplaceKernel::workspace) + 1;
constexpr const char* kInplaceNames[kInplaceKernels] = {"few_rows", "panels", "workspace"};

struct InplaceChoice {
  InplaceKernel kernel;
  const char* why;
  int tile_rows = 0, tile_columns = 0;  // of the result, per block; 0: cuBLAS decides

  const char* name() const { return kInplaceNames[static_cast<int>(kernel)]; }
};

// a: [M, K], any row stride; b: [K, N], or [N, K] with transb; bias: [N] or undefined; on the current device.
// What the call runs: launches nothing.
InplaceChoice choose_in_place(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb);

// The same for the arguments of the operator matmul_, of the first of a's matrices; raises the operator's errors. On a
// CPU, `workspace`.
InplaceChoice explain_in_place(const at::Tensor& a, const at::Tensor& b, bool transb,
                               const std::optional<at::Tensor>& bias, int64_t workspace);

// Writes a @ op(b) + bias over a's first columns by the kernel of choose_in_place. Returns false, doing nothing, if
// that is `workspace`.
bool multiply_in_place_sm90(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias, bool transb);

}  // namespace matmuls
