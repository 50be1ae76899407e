#include "rows/choose.h"

#include <c10/util/Exception.h>

#include <array>
#include <cmath>

#include <algorithm>

#include "glue/kernel_switch.h"
#include "rows/candidates.h"
#include "rows/kernel_sizes.h"

namespace matmuls {
namespace {

// Bytes; more than the static shared memory of any row kernel: states of the warps of a block and of the blocks of a
// cluster, at most 24 bytes each.
constexpr int64_t kStaticShared = 3 << 10;

constexpr std::array<std::string_view, kRowKernels> kNames = {
    "one_pass", "even_rows", "nearly_even", "two_pass", "persistent",           "persistent_unaligned",
    "cluster",  "staged",    "direct",      "reread",   "norm_backward_stream", "column_sums"};

// 16-bit rows that give each thread of one_pass exactly four vectors: 1 to 2 % faster there.
bool shared_by_fours(int64_t columns) { return columns == 2048 || columns == 4096; }

// softmax without a mask. Rows of middle length keep their exponentials in registers. Longer ones use few threads with
// many vectors each, which compute the exponentials twice. The longest are held in registers and shared memory
// (two_pass).
RowChoice choose_softmax(const RowFacts& f, const Candidates& of) {
  constexpr auto kHeld = RowForm::in_registers, kTwice = RowForm::computed_twice;
  const int64_t bytes = f.columns * f.element;
  if (f.element <= 4 && f.vectors) {
    // 513 to 672 float32 columns are five to six vectors for each lane of a warp.
    const bool fives = f.element == 4 && f.columns > 512 && f.columns <= 672;
    const bool few_threads = fives || bytes > (f.element == 2 ? 2 : 16) * 1024;
    if (!f.whole)
      if (const Candidate c = of.staged(kHeld, 1)) return *c;
    if (few_threads && !shared_by_fours(f.columns)) {
      if (const Candidate c = of.nearly_even(kTwice, !f.whole)) return *c;
      if (bytes > 32768)
        if (const Candidate c = of.two_pass(kTwice)) return *c;
    }
  }
  return of.general(f.whole && bytes > 16384 ? kTwice : kHeld);
}

// |scale| * log2(e), as packed arithmetic multiplies by it.
float packed_factor(const RowFacts& f) { return static_cast<float>(std::abs(f.scale)) * 1.4426950408889634f; }

// The most columns for which unaligned 16-bit rows are staged through shared memory. Shares of a copy on an H100,
// staged and (by vectors):
//
//   added mask [B,1,1,K], as many bytes as x   131 columns .88 (.57), 785 .95 (.81), 1025 .85 (.88)
//   no mask                                    197 .98 (.95), 257 .98 (1.01)
//   causal, of which vectors read half         150 .65 (.61), 197 .65 (.72)
//   byte mask [B,1,Q,K]                        150 .74 (.81)
int64_t staged_masked_columns(const RowFacts& f) {
  if (f.mask == MaskKind::bytes) return 127;
  if (f.mask == MaskKind::none) return f.causal ? 160 : 208;
  return kStagedMaskedColumns;
}

// The way to compute rows with 16-byte vectors of x and of its mask; any_mask if there is none.
RowForm form_by_vectors(const RowFacts& f) {
  if (f.mask == MaskKind::same) {
    const bool zero_times_inf = f.element == 2 && !std::isfinite(static_cast<float>(f.scale));  // would be NaN
    return zero_times_inf ? RowForm::any_mask : RowForm::vector_mask;
  }
  if (f.element == 4 || f.mask == MaskKind::float32) return RowForm::vector_mask;
  // half2 needs a finite scale whose factor is not 0.
  return std::isfinite(packed_factor(f)) && packed_factor(f) > 1e-30f ? RowForm::half2 : RowForm::any_mask;
}

// Aligned rows of whole vectors.
RowChoice choose_aligned_masked(const RowFacts& f, const Candidates& of, RowForm form) {
  const bool half2 = form == RowForm::half2, ends = half2 && (f.causal || f.mask == MaskKind::none);
  if (half2 && f.rows <= INT32_MAX) {
    if (f.columns == 128)
      if (const Candidate c = of.even(form, ends ? 4 : 2, ends ? 4 : 8, true, "128 columns")) return *c;
    if (ends) {
      // 512 and 1024 causal columns: 0.90 and 0.93 of a copy; 0.87 and 0.92 by one_pass.
      if (const Candidate c = of.even_fours(form)) return *c;
      // 1032 and 1280 causal columns: 0.93 and 0.94 of a copy; 0.56 and 0.69 by one_pass.
      if (!shared_by_fours(f.columns))
        if (const Candidate c = of.even_warps(form)) return *c;
    }
  }
  if (f.columns > 1024 && !shared_by_fours(f.columns))
    if (const Candidate c = of.nearly_even(form, false)) return *c;
  return of.general(form);
}

// Unaligned rows, whose mask rows may start anywhere.
Candidate choose_unaligned_masked(const RowFacts& f, const Candidates& of, RowForm form) {
  if (f.element == 2)
    if (const Candidate c = of.unaligned_warps(form)) return c;
  return of.nearly_even(form, true);
}

RowChoice choose_masked(const RowFacts& f, const Candidates& of) {
  constexpr auto kAny = RowForm::any_mask;
  if (f.element <= 4) {
    const RowForm form = form_by_vectors(f);
    if (f.whole && f.mask_vectors && form != kAny) return choose_aligned_masked(f, of, form);
    // Unaligned rows. Short ones are staged or read element by element, longer ones and their masks go by vectors:
    // float32 rows of 1023 columns, of which vectors are 1.12 times as fast, causal ones 1.39 times. Aligned float32
    // rows with an unaligned mask are not staged.
    const bool narrow = f.element == 2;
    if (f.vectors && (narrow || !f.whole)) {
      if (!f.whole && (!narrow || f.columns <= staged_masked_columns(f)))
        if (const Candidate c = of.staged(kAny, 1, narrow || !f.causal ? kStagedMaskedColumns : 608)) return *c;
      if (f.columns > 127 && !f.mask_steps && form != kAny)
        if (const Candidate c = choose_unaligned_masked(f, of, form)) return *c;
    }
  }
  return of.general(kAny);
}

// True if threads hold four vectors of each input, not two: 16-bit causal rows; other rows only if three vectors leave
// no lane of a warp idle (136 columns: 1.05 of a copy, 0.66 with two per thread), if more than 512 threads would share
// a row (8200 columns: 1.05, 0.78 otherwise), and for 8192 columns, which divide evenly among the threads.
bool four_vectors(const RowFacts& f) {
  const auto within = [&](int64_t least, int64_t most) { return f.columns > least && f.columns <= most; };
  const bool threes = within(64, 96) || within(128, 192) || within(256, 384) || within(512, 768);
  const bool many = f.causal ? within(64, 16384) : threes || within(8191, 16384);
  return f.element != 2 || (f.whole ? many : f.vectors && within(8192, 16391));
}

RowChoice choose_softmax_backward(const RowFacts& f, const Candidates& of) {
  const RowForm form = four_vectors(f) ? RowForm::only : RowForm::few_vectors;
  const bool even = f.whole && f.rows <= INT32_MAX;
  if (f.element == 4 && even && !f.causal && f.columns == 16384)
    if (const Candidate c = of.even(form, 4, 1024, true, "16384 columns: exactly four vectors for every thread"))
      return *c;
  if (f.element == 2 && form == RowForm::only) {
    if (even && f.causal && f.columns == 128)
      if (const Candidate c = of.even(form, 2, 8, true, "128 causal columns")) return *c;
    if (even && !f.causal)
      if (const Candidate c = of.even_fours(form)) return *c;
  } else if (f.element <= 4 && f.vectors) {
    if (!f.causal)
      if (const Candidate c = of.two_pass(form)) return *c;
    if (!f.whole) {
      // Columns that causal rows do not see are not read: 577 columns at 0.84 of a copy, 0.63 otherwise.
      if (f.element == 2 && f.causal && f.columns >= 128)
        if (const Candidate c = of.unaligned_warps(form)) return *c;
      if (const Candidate c = of.staged(form, 2)) return *c;
      if (const Candidate c = of.unaligned_cluster(form)) return *c;
    }
  }
  return of.general(form);
}

// Rows that divide evenly among the threads, where an H200 gains by it.
Candidate choose_even_norm(const RowFacts& f, const Candidates& of, bool rms) {
  constexpr auto kOnly = RowForm::only;
  constexpr auto kWhy = "the row divides evenly among the threads";
  if (f.residual) return f.element == 2 ? of.even_threes() : Candidate();
  if (f.element == 4) {
    if (f.columns == 8192 && rms) return of.even(kOnly, 4, 512, true, kWhy);
    return {};
  }
  if (rms) return {};
  const int64_t vectors = f.columns / 8;
  if (vectors == 48) return of.even(kOnly, 3, 16, true, kWhy);
  if (vectors == 96) return of.even(kOnly, 3, 32, true, kWhy);
  if (const Candidate c = of.even_threes()) return c;
  if (vectors > 48 && vectors < 64) return of.even(kOnly, 4, 16, false, "three to four vectors for every thread");
  if (vectors > 96 && vectors < 128) return of.even(kOnly, 4, 32, false, "three to four vectors for every thread");
  if (vectors == 1024) return of.even(kOnly, 8, 128, true, kWhy);
  return of.even_fours(kOnly);
}

// With a residual a thread holds twice as many vectors for each column, so half as many columns need the same threads.
Candidate choose_nearly_even_norm(const RowFacts& f, const Candidates& of) {
  constexpr auto kOnly = RowForm::only;
  if (f.element == 4)  // five vectors for each lane of a warp
    return !f.residual && f.columns > 512 && f.columns <= 640 ? of.nearly_even(kOnly, false) : Candidate();
  if (f.residual) return f.columns > 768 ? of.nearly_even(kOnly, false) : Candidate();
  return f.columns > 1024 ? of.nearly_even(kOnly, false) : Candidate();
}

RowChoice choose_norm(const RowFacts& f, const Candidates& of) {
  const bool rms = f.operation == RowOperation::rms_norm;
  if (f.element <= 4 && f.whole) {
    if (f.rows <= INT32_MAX && f.plain_constants)
      if (const Candidate c = choose_even_norm(f, of, rms)) return *c;
    if (const Candidate c = choose_nearly_even_norm(f, of)) return *c;
  } else if (f.element <= 4 && f.vectors) {
    if (const Candidate c = of.staged(RowForm::only, f.residual || f.keeps ? 2 : 1)) return *c;
    if (const Candidate c = of.persistent_unaligned()) return *c;
  }
  return of.general();
}

RowChoice choose_norm_backward(const RowFacts& f, const Candidates& of) {
  if (!f.wants_dx)
    return {.kernel = RowKernel::column_sums, .why = "only the sums over the rows are wanted", .threads = 256};
  if (const Candidate c = of.norm_backward_stream()) return *c;
  if (f.element <= 4 && f.vectors && !f.whole) {
    if (const Candidate c = of.staged(RowForm::only, 2)) return *c;
    if (const Candidate c = of.persistent_unaligned()) return *c;
  }
  return of.general();
}

RowChoice first_of_list(const RowFacts& f, const Candidates& of) {
  switch (f.operation) {
    case RowOperation::softmax: return choose_softmax(f, of);
    case RowOperation::scaled_masked_softmax: return choose_masked(f, of);
    case RowOperation::softmax_backward: return choose_softmax_backward(f, of);
    case RowOperation::norm_backward: return choose_norm_backward(f, of);
    default: return choose_norm(f, of);
  }
}

}  // namespace

RowChoice choose(const RowFacts& f, HasRoom has_room) {
  const RowChoice c = first_of_list(f, Candidates(f, has_room));
  // Lists end with a kernel that takes every row: it is off only if the kernels before it are.
  TORCH_CHECK_VALUE(!KernelSwitch<RowKernel>::is_off(c.kernel), "custom_mm: every kernel that takes these rows of ",
                    f.columns, " elements is switched off, ", name_of(c.kernel), " the last");
  return c;
}

bool has_room_by_limits(const RowFacts& f, const RowChoice& c) {
  if (c.scope == Scope::cluster && c.blocks_per_row > 1 && !f.device.sm90) return false;
  return c.shared + kStaticShared <= f.device.shared_per_block;
}

RowTraits traits_of(const RowFacts& f, RowForm form) {
  switch (f.operation) {
    case RowOperation::softmax: return softmax_traits(f.element, false, false, form == RowForm::in_registers);
    case RowOperation::scaled_masked_softmax:
      return form == RowForm::half2 ? softmax_half2_traits(f.causal || f.mask == MaskKind::none)
                                    : softmax_traits(f.element, true, form == RowForm::any_mask, true);
    case RowOperation::softmax_backward: return softmax_backward_traits(f.element, form == RowForm::few_vectors);
    case RowOperation::norm_backward: return norm_backward_traits(f.element);
    default: return norm_traits(f.element, f.operation == RowOperation::rms_norm, f.residual);
  }
}

bool is_compiled(const RowFacts& f, const RowChoice& c) {
  const RowTraits t = traits_of(f, c.form);
  const auto has = [&](const auto& list) { return std::ranges::any_of(list, [&](const auto& k) { return is(k, c); }); };
  if (!has_kernel(t, c.kernel, c.unaligned)) return false;
  switch (c.kernel) {
    case RowKernel::one_pass:
    case RowKernel::persistent:
      return (!t.whole_rows || c.elements > 1) && has(kGeneralVectors) &&
             t.has_vectors(c.scope, c.elements, c.unaligned, c.vectors) &&
             (c.kernel == RowKernel::one_pass ? t.has_one_pass(c.scope, c.unaligned)
                                              : t.has_persistent(c.scope, c.unaligned));
    case RowKernel::reread: return !t.whole_rows || c.elements > 1;
    case RowKernel::even_rows: return c.unaligned ? has(kUnalignedEven) : has(t.even);
    case RowKernel::nearly_even: return has(t.nearly_even);
    case RowKernel::two_pass: return has(two_pass_kernels(t));
    case RowKernel::cluster: return (c.unaligned || t.clusters(c.elements)) && has(cluster_vectors(t));
    case RowKernel::persistent_unaligned: return has(persistent_unaligned_vectors(t, c.scope));
    case RowKernel::staged:
      return std::ranges::any_of(
          kStaged, [&](const StagedRow& k) { return is(k, c) && has_staged(t, staged_columns(t, t.staged), k); });
    case RowKernel::direct: return has(kDirect);
    default: return true;  // one instance each
  }
}

RowGrid grid_of(const RowFacts& f, const RowChoice& c, int64_t resident) {
  const auto up_to = [](int64_t x, int64_t y) { return x / y + (x % y > 0); };
  const int64_t teams = up_to(f.rows, c.rows_per_block);  // blocks or clusters that give each team one row
  int64_t blocks = resident;
  int tiles = c.tiles_per_warp;
  switch (c.kernel) {
    case RowKernel::persistent: {
      // All rows of a team then have the same misalignment, so each thread keeps the same columns.
      if (c.unaligned && c.rows_per_block < c.elements && blocks > c.elements) blocks -= blocks % c.elements;
      blocks = std::min(blocks, teams);
      // The teams of a block that hold the same columns add up their sums.
      const bool adds = c.scope == Scope::warp && c.elements > 1 && !c.unaligned;
      return {blocks * c.blocks_per_row, adds ? blocks : blocks * c.rows_per_block, 0};
    }
    case RowKernel::persistent_unaligned:
      if (c.scope == Scope::block)  // all rows of a block have the same misalignment
        blocks = std::max<int64_t>(blocks - blocks % c.elements, c.elements);
      blocks = std::min(blocks, teams);
      return {blocks, blocks, 0};
    case RowKernel::cluster: return {std::min(blocks, f.rows) * c.blocks_per_row, 0, 0};
    case RowKernel::staged: {
      // With column sums, the smallest multiple of the resident blocks that keeps all of them busy.
      const int64_t rows = int64_t{c.tile_rows} * kTileWarps;  // of a block, per tile
      if (tiles == 0)
        tiles = static_cast<int>(std::max<int64_t>(up_to(f.rows, rows * (f.element == 4 ? 1 : 4) * resident), 1));
      blocks = up_to(f.rows, rows * tiles);
      return {blocks, blocks, tiles};
    }
    case RowKernel::norm_backward_stream: return {int64_t{c.teams} * c.blocks_per_row, c.teams, 0};
    case RowKernel::two_pass: return {f.rows * c.blocks_per_row, 0, 0};
    default: return {std::min<int64_t>(teams, INT32_MAX), 0, 0};
  }
}

std::string_view name_of(RowKernel kernel) { return kNames[static_cast<size_t>(kernel)]; }
std::string_view name_of(Scope scope) {
  return scope == Scope::warp ? "warp" : scope == Scope::block ? "block" : "cluster";
}
std::string_view name_of(RowForm form) {
  switch (form) {
    case RowForm::in_registers: return "in_registers";
    case RowForm::computed_twice: return "computed_twice";
    case RowForm::any_mask: return "any_mask";
    case RowForm::vector_mask: return "vector_mask";
    case RowForm::half2: return "half2";
    case RowForm::few_vectors: return "few_vectors";
    default: return "only";
  }
}

}  // namespace matmuls
