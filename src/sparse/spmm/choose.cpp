#include "sparse/spmm/choose.h"

#include <algorithm>
#include <array>

#include "glue/checks.h"
#include "glue/kernel_switch.h"
#include "sparse/csr.h"
#include "sparse/spmm/spmm.h"

namespace matmuls::spmm {
namespace {

// Chosen by `matmuls spmm` on an H200; benchmarks/results/spmm-cuda.json has what the choices give.
constexpr int64_t kSkewed = 8;                   // ratio of the longest row to the mean above which rows are cut
constexpr int64_t kWarpsAtOnce = 32;             // warps that a multiprocessor runs at once
constexpr int64_t kFullWarps = 14;               // warps that keep a multiprocessor's memory pipeline busy
constexpr int64_t kGroupNonzeros = 32;           // nonzeros of neighbouring rows that one team takes together
constexpr int64_t kMostRows = 8;                 // of a team, and at most one for each of its lanes
constexpr int64_t kLongRows = 32;                // mean nonzeros per row from which a row occupies all lanes of a warp
constexpr int64_t kShortestOfParts = 4;          // mean nonzeros per row from which few rows are split over parts
constexpr int64_t kVeryLongRows = 64;            // 16-bit: mean nonzeros per row; more teams with less prefetch win
constexpr int64_t kShortestPiece = 64;           // nonzeros of a piece; rows of up to twice as many are never cut
constexpr int64_t kPieceOfFour = 40;             // the same for teams of four lanes
constexpr int64_t kMostSlots = 16384;            // at most, where teams cut rows
constexpr int64_t kWorkspace = 32 << 20;         // bytes for the partial sums, about, or a quarter of the result
constexpr int64_t kShareSteps = 256;             // rows + nonzeros of a share; half as many where shares are few
constexpr int64_t kShareWarps = 24;              // warps of a multiprocessor that work on shares at once
constexpr int64_t kL2Bytes = 32 << 20;           // bytes of B that stay in the L2
constexpr double kMostDensifiedBytes = 1 << 27;  // bytes of the largest A that is densified without a plan

bool is_skewed(const ProductFacts& f) {
  return f.longest < 0 || f.longest * f.rows > kSkewed * std::max(f.nonzeros, f.rows);
}

int64_t elements_per_vector(const ProductFacts& f) { return f.vectors ? 16 / f.element_bytes : 1; }
int64_t columns_per_team(const ProductFacts& f, const RowsChoice& c) {
  return c.lanes * c.vectors * elements_per_vector(f);
}
// Bytes of the partial sums of one slot.
int64_t slot_bytes(const ProductFacts& f) { return 2 * f.batches * f.n * std::max(f.element_bytes, 4); }

void check_blocks(int64_t blocks) {
  TORCH_CHECK_VALUE(blocks <= INT32_MAX, kOp, ": expected at most 2^31 - 1 blocks of rows, got ", blocks);
}

RowsChoice split(int lanes, int parts, int vectors) {
  RowsChoice choice{};
  choice.lanes = lanes, choice.parts = parts, choice.vectors = vectors;
  return choice;
}

// A lane takes 32 bytes of a row of B rather than 16 if the row has as many, one team takes a whole slice of B's row,
// and a whole warp takes a row of A where rows are long and otherwise too few.
RowsChoice choose_split(const ProductFacts& f) {
  const int64_t v = elements_per_vector(f), vectors = ceil_of(f.n, v), mean = f.nonzeros / std::max<int64_t>(f.rows, 1);
  const int64_t full = kFullWarps * f.multiprocessors;
  const bool long_rows = mean >= kLongRows;
  if (v == 1) return split(f.n <= 4 ? 4 : f.n <= 8 ? 8 : 32, 1, 1);
  // Whether rows are too few to fill the GPU alone, and long enough that no part is empty.
  const auto few = [&](int64_t lanes) {
    return v >= 4 && mean >= kShortestOfParts && f.rows * f.batches * lanes / 32 < full;
  };
  RowsChoice c = split(32, 1, 1);
  if (vectors <= 4)
    c = split(4, long_rows && (v == 4 || few(12)) ? 8 : v == 8 && (long_rows || few(8)) ? 4 : 1, 1);
  else if (vectors <= 8)
    c = split(8, long_rows || few(v == 4 ? 8 : 16) ? 4 : 1, 1);
  else if (vectors == 16 && mean < 8 && f.rows * f.batches * 8 / 32 >= full)
    c = split(8, 1, 2);
  else if (vectors <= 16)
    c = split(16, 1, 1);
  else if (vectors % 64 == 0)
    c = split(32, 1, 2);
  else if (vectors % 32 == 0 && (vectors > 32 || long_rows || v > 4 || !few(16)))
    c = split(16, 1, 2);
  else if (vectors % 32 == 16)
    c = split(16, 1, 1);

  const int64_t slices = ceil_of(vectors, c.lanes * c.vectors);
  const auto warps = [&](int64_t lanes) { return f.rows * slices * f.batches * lanes / 32; };
  const bool narrow = v == 8 && c.vectors == 1 && slices == 1;
  if (c.lanes == 16 && (long_rows || (narrow && few(16))) && warps(16) < full)
    c.parts = 2;
  else if (c.lanes == 16 && narrow && mean >= kVeryLongRows)
    c.parts = 2, c.lean = true;

  // Fewer kernels for 64-bit types, to compile less.
  if (f.element_bytes == 8 && c.vectors * c.parts > 1) return split(std::min(32, c.lanes * c.vectors), 1, 1);
  return c;
}

bool takes_shares(const ProductFacts& f) { return elements_per_vector(f) >= 4; }

// Whether rows differ in length and there are shares enough to fill the GPU.
bool is_worth_sharing(const ProductFacts& f, const RowsChoice& c) {
  if (!takes_shares(f) || !is_skewed(f)) return false;
  const int64_t slices = ceil_of(f.n, columns_per_team(f, c));
  const int64_t shares = (f.rows + f.nonzeros) / (kShareSteps / 2) * slices * f.batches;
  return shares * c.lanes / 32 >= 2 * kShareWarps * f.multiprocessors;
}

// The slots at which teams cut long rows. A row is cut if it would take one team longer than all teams need for their
// equal share; pieces have the size of that share, but there are no more than the workspace holds. Rows of similar
// length are cut only if they are few. c.slots: as many, if rows are cut at all; returns whether that is worth it.
bool set_slots(RowsChoice& c, const ProductFacts& f) {
  const int64_t team = c.lanes * c.parts, slices = ceil_of(f.n, columns_per_team(f, c));
  const int64_t teams_at_once = f.multiprocessors * kWarpsAtOnce * 32 / team;
  const bool few = f.rows * slices * f.batches * team / 32 < kFullWarps / 2 * f.multiprocessors;
  const int64_t share = ceil_of(f.nonzeros * f.batches * slices, teams_at_once);
  const int64_t fit = std::clamp<int64_t>(kWorkspace / slot_bytes(f), 64, kMostSlots);
  c.slot = std::min<int64_t>(std::max({team <= 4 ? kPieceOfFour : kShortestPiece, share, ceil_of(f.nonzeros, fit)}),
                             INT32_MAX / 2);
  const bool may_be_long =
      f.nonzeros > INT32_MAX || ((few || is_skewed(f)) && (f.longest < 0 || f.longest > 2 * c.slot));
  c.slots = ceil_of(f.nonzeros, c.slot);
  return may_be_long && f.nonzeros > 2 * c.slot;
}

// The grid of spmm_rows_kernel. A team takes several neighbouring rows as long as the GPU stays full.
void set_grid(RowsChoice& c, const ProductFacts& f) {
  const int64_t team = c.lanes * c.parts, slices = ceil_of(f.n, columns_per_team(f, c));
  const int64_t teams = f.rows * slices * f.batches, teams_at_once = f.multiprocessors * kWarpsAtOnce * 32 / team;
  int64_t rows = 1;
  while (rows < std::min<int64_t>(kMostRows, team) && 2 * rows * f.nonzeros <= kGroupNonzeros * f.rows &&
         teams / (2 * rows) >= 2 * teams_at_once)
    rows *= 2;
  const int64_t in_block = kSparseThreads / team;
  const int64_t pieces = ceil_of(2 * c.slots, in_block), blocks = pieces + ceil_of(f.rows, in_block * rows);
  check_blocks(blocks * slices);
  c.rows_each = static_cast<int>(rows);
  c.piece_blocks = static_cast<unsigned>(pieces), c.blocks = static_cast<unsigned>(blocks);
  c.slices = static_cast<unsigned>(slices);
  // Narrow slices of a B that fits into the L2 vary fastest, so that a multiprocessor meets the same slice again and
  // again. Wide slices of such a B run one after another, for the L1. If B does not fit into the L2, the reverse.
  const bool in_cache = f.batches * f.columns * f.n * f.element_bytes <= kL2Bytes;
  c.slices_first = in_cache == (c.lanes <= 8);
}

// The shares and the grid of spmm_shares_kernel.
void set_shares(RowsChoice& c, const ProductFacts& f) {
  if (c.lanes == 8 && c.vectors == 2) c = split(16, 1, 1);
  if (c.lanes == 16 && c.vectors == 2) c = split(32, 1, 1);
  c.parts = 1, c.shares = true;
  const int64_t slices = ceil_of(f.n, columns_per_team(f, c)), way = f.rows + f.nonzeros;
  const int64_t room = std::max<int64_t>(kWorkspace, f.batches * f.rows * f.n * f.element_bytes / 4);
  const bool few = way / kShareSteps * slices * f.batches * c.lanes / 32 < 4 * kShareWarps * f.multiprocessors;
  c.slot = std::max(few ? kShareSteps / 2 : kShareSteps, ceil_of(way, std::max<int64_t>(room / slot_bytes(f), 64)));
  TORCH_CHECK_VALUE(c.slot <= INT32_MAX / 4, kOp, ": expected fewer nonzeros, got ", f.nonzeros);
  c.slots = way / c.slot + 1;
  const int64_t blocks = ceil_of(c.slots, kSparseThreads / c.lanes);
  check_blocks(blocks * slices);
  c.blocks = static_cast<unsigned>(blocks), c.slices = static_cast<unsigned>(slices);
}

bool is_off(SpmmKernel kernel) { return KernelSwitch<SpmmKernel>::is_off(kernel); }

}  // namespace

const char* name_of(SpmmKernel kernel) {
  constexpr std::array<const char*, kSpmmKernels> kNames{"by_rows", "split_rows", "shares", "fp16x2", "dense"};
  return kNames[static_cast<int>(kernel)];
}

RowsChoice choose_rows(const ProductFacts& f, bool all_kernels) {
  using enum SpmmKernel;
  const RowsChoice whole = choose_split(f);
  RowsChoice cut = whole;
  const bool worth_sharing = is_worth_sharing(f, whole), worth_cutting = set_slots(cut, f);
  const std::array<SpmmKernel, 3> order = worth_sharing   ? std::array{shares, split_rows, by_rows}
                                          : worth_cutting ? std::array{split_rows, by_rows, shares}
                                                          : std::array{by_rows, split_rows, shares};
  for (const SpmmKernel kernel : order) {
    // by_rows counts the nonzeros of a row in 32 bits.
    const bool takes = kernel == shares       ? takes_shares(f)
                       : kernel == split_rows ? cut.slots > 0
                                              : f.nonzeros <= INT32_MAX;
    if (!takes || (!all_kernels && is_off(kernel))) continue;
    RowsChoice choice = kernel == split_rows ? cut : whole;
    if (kernel == shares) {
      set_shares(choice, f);
    } else {
      choice.slot = cut.slot;
      set_grid(choice, f);
    }
    return choice;
  }
  TORCH_CHECK_VALUE(false, kOp, ": every kernel that takes this product of ", f.rows, " x ", f.columns, ", ",
                    f.nonzeros, " nonzeros, times ", f.n, " columns is switched off, ", name_of(order[0]),
                    " the first");
}

// Estimated microseconds of both, as measured on an H200: launches, bytes of A written and read, products.
bool is_worth_densifying(const ProductFacts& f, bool copies) {
  const bool wide = f.element_bytes == 4;
  const double n = static_cast<double>(f.n), nonzeros = static_cast<double>(f.nonzeros);
  const double by_rows = wide ? 4 + nonzeros * n / 3.5e6 : 3 + nonzeros * n / 5.8e6;
  if (f.element_bytes == 8 || by_rows < 20) return false;
  const double elements = static_cast<double>(f.rows) * static_cast<double>(f.columns);
  const double bytes = elements * f.element_bytes;
  const double densified = wide ? 26 + bytes / 2.6e6 + nonzeros / 5e5 + std::max(bytes / 2.8e6, elements * n / 1.23e8)
                                : 12 + bytes / 2.2e6 + nonzeros / 6.5e5 + std::max(5.0, elements * n / 3.5e8);
  const double moved = static_cast<double>((f.rows + f.columns) * f.n) * f.element_bytes;
  return bytes <= kMostDensifiedBytes && densified + (copies ? 10 + 2 * moved / 2.2e6 : 0) < by_rows;
}

std::optional<SpmmKernel> densified_kernel(const ProductFacts& f, const DensifyFacts& m) {
  if (!m.plain || f.batches != 1 || f.element_bytes == 8) return {};
  if (f.element_bytes == 2) return m.alpha_one && m.cublas ? std::optional(SpmmKernel::dense) : std::nullopt;
  return m.fp16x2 && f.nonzeros >= kFewestInFp16x2 * f.rows ? std::optional(SpmmKernel::fp16x2) : std::nullopt;
}

std::optional<SpmmKernel> choose_densified(const ProductFacts& f, const DensifyFacts& m) {
  using enum SpmmKernel;
  const std::optional<SpmmKernel> kernel = densified_kernel(f, m);
  if (!kernel || is_off(*kernel)) return {};
  const bool alone = is_off(by_rows) && is_off(split_rows) && is_off(shares);
  return alone || is_worth_densifying(f, !is_aligned(f)) ? kernel : std::nullopt;
}

}  // namespace matmuls::spmm
