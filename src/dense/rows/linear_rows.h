// linear_rows: y = activation(x @ w^T + bias) for the first `count` rows of x, a number that may be in GPU memory
// alone.
//
// On Hopper one kernel computes it (kernel_sm90.cu). A cluster of blocks has a tile of the columns of y; its blocks are
// `copies` of neighbouring panels of rows, which share the tile of w, times `parts` of K:
//
//   cluster = 4, parts = 2         K first half           K second half
//   panel 2 r                      block 0                block 2
//   panel 2 r + 1                  block 1                block 3
//
// If few rows are live, `parts` is doubled until the clusters just cover them: blocks whose panel would be idle then
// take a part of K of another panel.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>

#include "glue/activation.h"
#include "glue/checks.h"

namespace matmuls {

// x [M, K], w [N, K], bias [N], in bfloat16 or float16; count: one int32 on x's device, without it M; out [M, N], made
// if not given. Rows from count on are not written. On a GPU the rows of x, w and out start at multiples of 16 bytes.
// The result of a row does not depend on the other rows, but its rounding may depend on count: it says how K is split.
at::Tensor linear_rows(const at::Tensor& x, const at::Tensor& w, const OptionalTensor& bias,
                       std::optional<std::string_view> activation, const OptionalTensor& count,
                       const OptionalTensor& out);

namespace dense_rows {

// A checked call: bias and count may be undefined.
struct Operands {
  at::Tensor x, w, bias, count, out;
  Activation activation;
};

struct Configuration {
  int rows, columns;   // of a block's tile
  int cluster, parts;  // blocks of a cluster, and in how many parts they divide K at least

  constexpr int copies() const { return cluster / parts; }
  // Blocks that a multiprocessor has room for.
  constexpr int resident() const { return rows * columns > 128 * 128 ? 1 : 2; }
};
constexpr Configuration kConfigurations[] = {
    {64, 64, 1, 1},   {64, 64, 2, 2},   {64, 64, 4, 4},   {64, 64, 8, 8},   {64, 128, 1, 1},  {64, 128, 2, 2},
    {64, 128, 4, 4},  {64, 128, 8, 8},  {64, 128, 2, 1},  {128, 64, 1, 1},  {128, 64, 2, 1},  {128, 64, 2, 2},
    {128, 64, 4, 4},  {128, 96, 1, 1},  {128, 96, 2, 1},  {128, 96, 2, 2},  {128, 96, 4, 2},  {128, 128, 1, 1},
    {128, 128, 2, 1}, {128, 128, 2, 2}, {128, 128, 4, 2}, {128, 128, 4, 4}, {128, 192, 1, 1}, {128, 192, 2, 1},
    {128, 192, 4, 1}, {128, 192, 4, 2}, {128, 192, 4, 4}, {128, 192, 8, 4}, {128, 256, 1, 1}, {128, 256, 2, 1},
    {128, 256, 4, 2}};
// "128x192 in 2x4": rows x columns in copies x parts.
std::string name_of(const Configuration& c);

// Estimated cycles of a launch for `rows` rows of which `live` are computed.
double estimate(const Configuration& c, int64_t live, int64_t rows, int64_t columns, int64_t inner,
                int multiprocessors);
// The configuration of the least estimate; counted: of all rows and of half of them.
Configuration choose(int64_t rows, int64_t columns, int64_t inner, bool counted, int multiprocessors);

#ifdef MATMULS_CUDA
// True if the kernel takes the operands: a Hopper GPU, and rows of whole 16 bytes that start at multiples of them.
bool fits(const Operands& o);
// Launches the kernel on the current device and stream. Needs fits(o), and at least one result.
void launch(const Operands& o, const Configuration& c);
#endif

}  // namespace dense_rows
}  // namespace matmuls
