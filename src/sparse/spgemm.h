// Products of two sparse matrices in CSR: C [rows, columns] = A [rows, middle] @ B [middle, columns].
//
// Operators, in the order in which a plan calls them:
//   csr_spgemm_size: the number of nonzeros of C, before C takes memory
//   csr_spgemm_pattern: the pattern of C, whose columns rise within each row; with its values, if A and B come with
//     theirs. nonzeros = -1 says that they were not counted; offsets and state are not read then, and a GPU waits
//   csr_spgemm: the values of C
//   csr_spgemm_sampled: the values of G @ M^T at the nonzeros of a pattern P, for gradients
//
// The operators take patterns as lists of tensors: [crow, col, order], then [t_crow, t_col, t_order] of the transposed
// matrix, which gradients compute if it is not given. An order that is not needed is a tensor without elements. Columns
// of C and of G must rise within each row. csr_spgemm_size also returns a state, which csr_spgemm_pattern takes: on a
// GPU the columns that it found, if they are not too many.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "sparse/csr.h"

namespace matmuls::spgemm {

constexpr const char *kSize = "csr_spgemm_size", *kPattern = "csr_spgemm_pattern", *kProduct = "csr_spgemm",
                     *kSampled = "csr_spgemm_sampled";

using Made = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // crow, col, values of C

// A checked call of the first three operators. c and the values are undefined where an operator does not take them.
struct Product {
  Pattern a, b, c;
  at::Tensor a_values, b_values;
  c10::SymInt columns;
};

// A checked call of csr_spgemm_sampled: P [rows, middle], G [rows, columns], M [middle, columns].
struct Sampled {
  Pattern p, g, m;
  at::Tensor g_values, m_values;
  c10::SymInt columns;
};

// Everything that can be checked without reading indices.
Product checked(const char* op, at::TensorList a, at::TensorList b, const c10::SymInt& columns);
Product checked(const char* op, const at::Tensor& a_values, const at::Tensor& b_values, at::TensorList a,
                at::TensorList b, at::TensorList c, const c10::SymInt& columns);
Product checked_pattern(at::TensorList a, at::TensorList b, const c10::SymInt& columns, const at::Tensor& offsets,
                        const c10::SymInt& nonzeros, const OptionalTensor& a_values, const OptionalTensor& b_values);
// ValueError if the indices of the call do not reach that many nonzeros.
void expect_reachable(const Product& call, int64_t nonzeros);
// The values of C for csr_spgemm_pattern, by csr_spgemm; without elements if the call has none.
at::Tensor values_of_pattern(const Product& call, const at::Tensor& crow, const at::Tensor& col);

// The types that the loops compute in: 16-bit values are converted to float32.
inline at::Tensor wide(const at::Tensor& values) {
  const auto dtype = values.scalar_type();
  return (dtype == at::kHalf || dtype == at::kBFloat16 ? values.to(at::kFloat) : values).contiguous();
}

at::Tensor size_cpu(const Product& call);  // [rows + 1] int64: offsets of the rows of C
// The columns of C. offsets: contiguous, and checked to rise from 0 to nonzeros.
at::Tensor pattern_cpu(const Product& call, const at::Tensor& offsets, int64_t nonzeros);
// C with its values in one pass, by the offsets of size_cpu or, if these are undefined, without them, in memory of
// which pages are taken only where C is written. None where the rows of C are searched, or if there are too many
// products.
std::optional<Made> at_once_cpu(const Product& call, const at::Tensor& offsets);
at::Tensor values_cpu(const Product& call);
at::Tensor sampled_cpu(const Sampled& call);

// sampled.cu, on the current device; the patterns are contiguous, the values float32 or float64.
void sampled_on_gpu(const Pattern& p, const Pattern& g, const Pattern& m, const at::Tensor& g_values,
                    const at::Tensor& m_values, const at::Tensor& out);

}  // namespace matmuls::spgemm
