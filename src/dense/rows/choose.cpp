// Where linear_rows runs, and the configuration that is estimated to be the fastest.
#include <algorithm>
#include <cmath>
#include <utility>

#include "dense/rows/linear_rows.h"

namespace matmuls::dense_rows {
namespace {

// Microseconds of the busiest multiprocessor, without what all configurations take. The constants were fitted to the
// times of 89 products on an H200 (16 to 4096 rows, w [384 to 4096, 384 to 4096], bfloat16). For 86 of these the choice
// is within 5 % of the best time of kConfigurations, for all within 10 %; the worst is 9 % (256x4096x1024).
double estimate(const Configuration& c, int64_t rows, int64_t columns, int64_t inner, int multiprocessors) {
  // A step of 64 k of a block alone, and of two blocks on a multiprocessor.
  const auto [alone, both] = c.rows == 64      ? std::pair{0.294, 0.597}
                             : c.columns == 64 ? std::pair{0.272, 0.502}
                             : c.columns == 96 ? std::pair{0.312, 0.608}
                                               : std::pair{0.500, 0.741};
  const int64_t blocks = ceil_of(rows, c.rows) * ceil_of(columns, c.columns) * c.parts;
  // Clusters of 8 do not fill the multiprocessors: 128 blocks took 1.2 to 1.3 times as long as 64 in clusters of 4.
  const auto most = ceil_of(blocks, c.parts == 8 ? std::max(1, multiprocessors * 4 / 5) : multiprocessors);
  const auto steps = static_cast<double>(ceil_of(ceil_of(inner, 64), c.parts)), parts = static_cast<double>(c.parts);
  const double thousands = c.rows * c.columns / 1000.0;  // results of a tile
  const double exchange =
      c.parts == 1 ? 0 : 0.106 * std::log2(parts) + 0.125 * parts + 0.30 * thousands * (parts - 1) / parts;
  const double ends = 0.96 + 0.134 * thousands / parts + exchange;
  return static_cast<double>(most % 2) * (steps * alone + ends) + static_cast<double>(most / 2) * (steps * both + ends);
}

// True if at least 0.9 of the clusters of linear_tiles compute as many tiles as the busiest one.
bool tiles_fill_the_gpu(int64_t rows, int64_t columns, int multiprocessors) {
  const int64_t clusters = std::max(1, multiprocessors / 2), tiles = ceil_of(rows, 256) * ceil_of(columns, 256);
  return 10 * tiles >= 9 * clusters * ceil_of(tiles, clusters);
}

}  // namespace

std::string name_of(const Configuration& c) {
  return std::to_string(c.rows) + "x" + std::to_string(c.columns) + " in " + std::to_string(c.parts);
}

Configuration choose(int64_t rows, int64_t columns, int64_t inner, int multiprocessors) {
  return *std::ranges::min_element(
      kConfigurations, {}, [&](const Configuration& c) { return estimate(c, rows, columns, inner, multiprocessors); });
}

// Measured on an H200 in bfloat16. With gelu, of 16 to 16384 rows and K up to 1024, linear_rows takes 0.61 to 0.86 of
// the time of cuBLASLt and bias_act_; without an activation 0.59 to 1.00 where it is taken, 0.84 on average.
// linear_tiles, where it is taken, takes 1.01 of the time of linear_rows for K = 768 (0.91 between the other products
// of an encoder), 0.96 to 1.00 for K = 1024, 0.90 to 0.97 for K of 1280 and 2048, and for K of 3072 and 4096 0.91 to
// 0.95 of that of cuBLASLt and bias_act_. cuBLASLt has the other activations in its epilogue.
ProductKernel fastest(int64_t rows, int64_t columns, int64_t inner, Activation activation, int multiprocessors,
                      bool with_tiles) {
  if (activation == Activation::gelu) {
    const bool many = rows >= 1536 && columns >= 512 && inner >= 768 && inner <= 8192;
    if (with_tiles && many && tiles_fill_the_gpu(rows, columns, multiprocessors)) return ProductKernel::linear_tiles;
    return rows <= 65536 && columns <= 8192 && inner <= 2048 ? ProductKernel::linear_rows : ProductKernel::cublaslt;
  }
  const bool few = rows <= 128 || (rows <= 256 && inner <= 3072) || (rows <= 512 && inner <= 1024);
  const bool pays = activation == Activation::none && few && columns >= 384 && columns <= 4096 &&
                    inner >= (rows < 64 ? 768 : 384) && inner <= 4096;
  return pays ? ProductKernel::linear_rows : ProductKernel::cublaslt;
}

}  // namespace matmuls::dense_rows
