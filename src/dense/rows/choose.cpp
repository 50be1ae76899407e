// The configuration of linear_rows that is estimated to be the fastest.
#include <algorithm>
#include <cmath>
#include <limits>

#include "dense/rows/linear_rows.h"

namespace matmuls::dense_rows {

std::string name_of(const Configuration& c) {
  return std::to_string(c.rows) + "x" + std::to_string(c.columns) + " in " + std::to_string(c.copies()) + "x" +
         std::to_string(c.parts);
}

// Cycles of the busiest multiprocessor. A K step takes as long as its products or its loads. Tensor cores multiply a
// tile of 32 results by the 64 k of a step per cycle; 36 bytes a cycle arrive (panels_sm90.cu: 24 KB in 700 cycles).
double estimate(const Configuration& c, int64_t live, int64_t rows, int64_t columns, int64_t inner,
                int multiprocessors) {
  constexpr double kBytes = 36;    // per cycle
  constexpr double kBegin = 2000;  // of a block: its first loads and its stores
  constexpr double kMeet = 700;    // of a cluster that exchanges sums
  const int64_t down = ceil_of(ceil_of(rows, c.rows), c.copies()), panels = ceil_of(live, c.rows);
  int parts = c.parts;
  while (parts < c.cluster && panels * 2 * parts <= down * c.cluster) parts *= 2;  // as the kernel does
  const int64_t clusters = ceil_of(panels * parts, c.cluster) * ceil_of(columns, c.columns);
  const int64_t at_once = std::max(multiprocessors / c.cluster, 1);
  const auto blocks = static_cast<double>(ceil_of(clusters, at_once));  // of the busiest multiprocessor
  const auto filled = static_cast<double>(std::min<int64_t>(live, c.rows));
  const double products = c.rows * c.columns / 32.0;
  const double loads = (filled + static_cast<double>(c.columns * parts) / c.cluster) * 128 / kBytes;
  const auto steps = static_cast<double>(ceil_of(ceil_of(inner, 64), parts));
  const double exchange = parts == 1 ? 0 : kMeet + 4.0 * c.rows * c.columns * (parts - 1) / parts / kBytes;
  return blocks * (steps * std::max(products, loads) + exchange) + kBegin * std::ceil(blocks / c.resident());
}

Configuration choose(int64_t rows, int64_t columns, int64_t inner, bool counted, int multiprocessors) {
  const auto cost = [&](const Configuration& c) {
    const auto of = [&](int64_t live) { return estimate(c, live, rows, columns, inner, multiprocessors); };
    if (rows <= 64 && c.rows > 64) return std::numeric_limits<double>::infinity();
    return counted ? of(rows) + of(ceil_of(rows, 2)) : of(rows);
  };
  return *std::ranges::min_element(kConfigurations, {}, cost);
}

}  // namespace matmuls::dense_rows
