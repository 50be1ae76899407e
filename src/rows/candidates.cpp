#include "rows/candidates.h"

#include <algorithm>
#include <bit>
#include <climits>

#include "glue/kernel_switch.h"
#include "rows/kernel_sizes.h"

namespace matmuls {
namespace {

int64_t up_to(int64_t x, int64_t y) { return x / y + (x % y > 0); }  // x / y rounded up
int64_t warps_of(int64_t threads) { return up_to(threads, 32) * 32; }
int power_of_two(int64_t x) { return static_cast<int>(std::bit_ceil(static_cast<uint64_t>(x))); }

// The number of vectors per thread of the compiled warp kernels: 1, 2, 3 or `most`.
int compiled_vectors(int vectors, int most) { return vectors <= 3 && vectors < most ? vectors : most; }

// Threads per row at most, of one_pass.
constexpr int kOnePassThreads = 512;
// Threads per block at most of few_threads rows on a cluster.
constexpr int kFewThreads = 256;

}  // namespace

RowChoice Candidates::made(RowKernel kernel, RowForm form, const char* why) const {
  RowChoice c{.kernel = kernel, .why = why, .form = form};
  c.elements = 16 / f.element;
  return c;
}

Candidate Candidates::offered(const RowChoice& c) const {
  return KernelSwitch<RowKernel>::is_off(c.kernel) ? Candidate() : Candidate(c);
}

Candidate Candidates::offered_with_room(const RowChoice& c) const { return has_room_(f, c) ? offered(c) : Candidate(); }

// ------------------------------------------------------------------------------------------------ the general kernels

struct Candidates::General {
  RowKernel kernel;  // one_pass, persistent, or reread if neither holds the row
  Scope scope;
  int vectors;  // per thread
  int threads;  // of a block, per row
  int rows_per_block, blocks_per_row;
};

// Clusters for rows that no block holds. reread if no cluster holds them either.
Candidates::General Candidates::divide_among_clusters(const RowTraits& t, int64_t vectors) const {
  const auto shared_by = [&](int held, int64_t most_threads) -> General {
    const int64_t all = up_to(vectors, held);
    const int ranks = std::clamp(power_of_two(up_to(all, most_threads)), 2, kMaxRanks);
    return {RowKernel::persistent, Scope::cluster, held, static_cast<int>(warps_of(up_to(all, ranks))), 1, ranks};
  };
  // 16-bit rows with one constant: few threads with many vectors each reach 0.90 to 0.92 of a copy at 262144 columns.
  // Such rows that are too long have too many vectors for fewer vectors per thread.
  if (t.few_threads() && up_to(vectors, t.long_vectors) <= kMaxRanks * kFewThreads)
    return shared_by(t.long_vectors, kFewThreads);
  for (const int held : {t.long_clusters() ? t.long_vectors : t.vectors, t.long_vectors})
    if (up_to(vectors, held) <= kMaxRanks * t.most_threads) return shared_by(held, t.most_threads);
  return {RowKernel::reread, Scope::block, t.vectors, 256, 1, 1};
}

// How a row is divided among threads. Few threads with many vectors each need the fewest instructions per column.
Candidates::General Candidates::divide(const RowTraits& t, int elements, bool unaligned) const {
  const int most = t.most_vectors(elements);
  const bool walks = t.always_persistent(unaligned);
  const int64_t vectors = up_to(f.columns, elements) + (unaligned ? 1 : 0);
  int64_t threads = warps_of(up_to(vectors, most));
  if (threads == 32) {
    // At least 4 lanes share a row of at least 4 vectors, so that they access 64 contiguous bytes.
    const int lanes = std::max(power_of_two(up_to(vectors, most)), std::min(4, power_of_two(vectors)));
    // Unaligned rows and single elements: one kernel for all short rows.
    const bool any = elements == 1 || unaligned;
    const int held = any ? most : compiled_vectors(static_cast<int>(up_to(vectors, lanes)), most);
    return {
        walks ? RowKernel::persistent : RowKernel::one_pass, Scope::warp, held, lanes, (walks ? 256 : 64) / lanes, 1};
  }
  if (unaligned && !walks) threads = warps_of(up_to(f.columns / elements, most));  // for the whole vectors only
  const bool keeps = walks || (elements > 1 && threads > t.row_most + (unaligned ? 32 : 0));
  if (threads <= (keeps ? t.most_persistent(Scope::block, unaligned) : kOnePassThreads)) {
    if (t.threes(elements, unaligned) && 100 * vectors < 68 * most * threads)
      return {RowKernel::persistent, Scope::block, 3, static_cast<int>(warps_of(up_to(vectors, 3))), 1, 1};
    return {keeps ? RowKernel::persistent : RowKernel::one_pass, Scope::block, most, static_cast<int>(threads), 1, 1};
  }
  if (elements > 1 && f.device.sm90) return divide_among_clusters(t, vectors);
  return {RowKernel::reread, Scope::block, most, 256, 1, 1};
}

// Unaligned rows of norms that many blocks share are faster read twice (H200, benchmarks/results/kernels-cuda.json at
// commit 583f14f): 50257 and 151643 columns, RMS norm in bfloat16 1.4 times as fast, with a residual 2.5 and 1.6 times;
// in float32 1.1 times at 151643.
bool Candidates::too_many_blocks(const RowTraits& t, const General& g, bool unaligned) const {
  return t.element <= 4 && unaligned && t.constants > 0 && !t.column_sums &&
         g.blocks_per_row > (t.element == 2 ? 2 : 8);
}

// Shared memory of a persistent block: constants, one row of each of its teams for each stage, merging.
struct Candidates::PersistentBytes {
  int64_t constants, row, merging;

  PersistentBytes(const RowTraits& t, const RowChoice& c) {
    const int64_t word = c.elements > 1 ? 16 : std::max(t.element, 4);
    const bool own_constants = c.scope == Scope::warp && c.unaligned;  // the rows of a block differ in alignment
    constants = word * c.vectors * t.constants * c.threads * (own_constants ? c.rows_per_block : 1);
    row = c.elements == 1
              ? 0
              : (word * c.vectors * t.inputs + (t.number ? t.arithmetic() : 0)) * c.threads * c.rows_per_block;
    merging = (4 * kMaxRanks + 64) * (t.state + 8) + 256;
  }
};

// Rows in flight: as many as leave room for the blocks that an SM should run, at least two, at most four.
int Candidates::stages_of(const RowTraits& t, const RowChoice& c, const PersistentBytes& bytes) const {
  if (bytes.row == 0) return 1;
  const int threads = c.threads * c.rows_per_block;
  const bool few = c.scope == Scope::cluster && t.few_threads() && c.vectors == t.long_vectors;
  for (int blocks = few ? 1 : std::max(1, (t.threads_per_sm + threads / 2) / threads);; --blocks) {
    const int64_t mine = std::min(f.device.shared_per_multiprocessor / blocks - 1024, f.device.shared_per_block) -
                         bytes.merging - bytes.constants;
    const auto fit = static_cast<int>(std::max<int64_t>(mine, 0) / bytes.row);
    if (fit >= 2 || blocks == 1) return std::min(fit, 4);
  }
}

RowChoice Candidates::general(RowForm form) const {
  const RowTraits t = traits_of(f, form);
  const bool by_vectors = f.vectors || t.whole_rows, unaligned = by_vectors && !(f.whole || t.whole_rows);
  const int elements = by_vectors ? t.elements_of_vector() : 1;
  const General g = divide(t, elements, unaligned);
  RowChoice c = made(g.kernel, form, "");
  c.elements = elements, c.unaligned = unaligned, c.scope = g.scope, c.vectors = g.vectors, c.threads = g.threads;
  c.rows_per_block = g.rows_per_block, c.blocks_per_row = g.blocks_per_row;
  if (g.kernel == RowKernel::one_pass && t.has_one_pass(g.scope, unaligned)) {
    c.why = "the threads of a block, a warp or part of a warp hold the row in registers";
    if (const Candidate one_pass = offered(c)) return *one_pass;
  }
  if (g.scope == Scope::cluster && !unaligned && t.clusters(elements))
    if (const Candidate wide = cluster(form, t, false)) return *wide;
  if (g.kernel == RowKernel::persistent && t.has_persistent(g.scope, unaligned) && !too_many_blocks(t, g, unaligned)) {
    const PersistentBytes bytes(t, c);
    c.stages = stages_of(t, c, bytes);
    c.shared = bytes.constants + bytes.row * c.stages;
    c.why = t.column_sums                  ? "column sums over the rows stay in the threads of resident blocks"
            : g.scope == Scope::cluster    ? "a cluster shares a row that is too long for a block"
            : unaligned && t.constants > 0 ? "constants of unaligned rows are loaded once for all rows"
                                           : "rows that fill a multiprocessor are prefetched";
    if (c.stages > 0)
      if (const Candidate persistent = offered_with_room(c)) return *persistent;
  }
  c = made(RowKernel::reread, form, "no other kernel holds the row in registers and shared memory");
  c.elements = elements, c.unaligned = unaligned, c.vectors = t.most_vectors(elements), c.threads = 256;
  return c;
}

// A cluster per row, of the fewest blocks that have room for it: each thread then holds five to eight vectors, or three
// to four of each of two inputs.
Candidate Candidates::cluster(RowForm form, const RowTraits& t, bool unaligned) const {
  const int most = kClusterVectors / t.inputs;
  const int64_t vectors = f.columns / t.elements_of_vector();
  int64_t ranks = 1;
  while (ranks * kClusterThreads * most < vectors) ranks *= 2;
  if (ranks > kMaxRanks) return {};
  const int64_t held = up_to(vectors, ranks * kClusterThreads), least = most == 4 ? 3 : 5;
  RowChoice c = made(RowKernel::cluster, form, "resident clusters share rows that are too long for a block");
  c.scope = Scope::cluster, c.unaligned = unaligned, c.threads = kClusterThreads;
  c.vectors = held >= least && held < most ? static_cast<int>(held) : most;
  c.blocks_per_row = static_cast<int>(ranks);
  c.stages = cluster_stages(c.vectors * t.inputs);
  c.shared = c.stages * static_cast<int64_t>(cluster_row_bytes(c.vectors * t.inputs));
  return offered_with_room(c);
}

Candidate Candidates::unaligned_cluster(RowForm form) const {
  const RowTraits t = traits_of(f, form);
  if (f.columns / t.elements_of_vector() <= 2048 || !f.device.sm90) return {};
  return cluster(form, t, true);
}

// ------------------------------------------------------------------------------------------------ even_rows,
// nearly_even

Candidate Candidates::even(RowForm form, int vectors, int threads, bool exact, const char* why) const {
  RowChoice c = made(RowKernel::even_rows, form, why);
  c.vectors = vectors, c.threads = threads, c.exact = exact;
  c.scope = threads > 32 ? Scope::block : Scope::warp;
  c.rows_per_block = even_rows_per_block(threads, false);
  return offered(c);
}

Candidate Candidates::even_fours(RowForm form) const {
  for (const EvenRows& k : traits_of(f, form).even)
    if (k.vectors == 4 && k.exact && f.columns * f.element == int64_t{64} * k.threads)
      return even(form, k.vectors, k.threads, true, "exactly four vectors for every thread");
  return {};
}

// With two vectors per thread, or with a power of two of threads for all vectors, half of the threads would be idle:
// 16-bit layer norm with a residual, of 136 and 384 columns, reaches 0.94 and 1.05 of a copy, otherwise 0.64 and 0.89.
Candidate Candidates::even_threes() const {
  const int64_t vectors = f.columns * f.element / 16;
  for (const EvenRows& k : kThrees)
    if (vectors > 2 * k.threads && vectors <= 3 * k.threads)
      return even(RowForm::only, k.vectors, k.threads, k.exact, "two to three vectors for every thread");
  return {};
}

// A block has two rows: blocks of one warp would start too slowly where rows do not see all of their columns.
Candidate Candidates::even_warps(RowForm form) const {
  const int64_t held = up_to(f.columns * f.element, 16 * 32);
  for (const EvenRows& k : traits_of(f, form).even)
    if (held == k.vectors && k.vectors > 4 && k.threads == 32)
      return even(form, k.vectors, 32, k.exact, "five to eight vectors for every lane of a warp");
  return {};
}

Candidate Candidates::unaligned_warps(RowForm form) const {
  const int elements = 16 / f.element;
  // Whole vectors of a row, depending on its alignment.
  const int64_t least = (f.columns - elements + 1) / elements, most = f.columns / elements;
  if (f.rows > INT32_MAX) return {};
  for (const auto& [vectors, threads, exact] : kUnalignedEven) {
    if (most > vectors * threads || least < (vectors - 1) * threads) continue;
    Candidate c =
        even(form, vectors, threads, exact, "whole vectors for a warp or half a warp, edge elements one by one");
    if (c) c->unaligned = true, c->rows_per_block = even_rows_per_block(threads, true);
    return c;
  }
  return {};
}

Candidate Candidates::nearly_even(RowForm form, bool unaligned) const {
  const int64_t all = f.columns / (16 / f.element);  // some unaligned rows have one fewer
  int64_t fewest = INT64_MAX;
  RowChoice c = made(RowKernel::nearly_even, form, "few threads with many vectors each, of which some lack one");
  for (const int held : traits_of(f, form).nearly_even) {
    const int64_t threads = warps_of(up_to(all, held));
    if (threads > 256 || (held - 1) * threads > all - unaligned || held * threads >= fewest) continue;
    fewest = held * threads, c.vectors = held, c.threads = static_cast<int>(threads);
  }
  if (c.vectors == 0 || f.rows > INT32_MAX) return {};
  c.unaligned = unaligned;
  return offered(c);
}

// ------------------------------------------------------------------------------------------------------------ two_pass

Candidate Candidates::two_pass(RowForm form) const {
  const RowTraits t = traits_of(f, form);
  const int64_t row_bytes = f.columns * t.inputs * t.element;
  // Bytes of a row that one block holds, at most: about its registers and its half of the shared memory.
  const int64_t most_bytes = int64_t{t.inputs == 1 && t.element == 4 ? 170 : 150} << 10;
  int64_t ranks = 1;
  while (ranks * most_bytes < row_bytes) ranks *= 2;
  if (ranks > kMaxRanks || f.rows > INT32_MAX / ranks || !f.device.sm90) return {};
  // Whole parts of a row per block, least and most: they depend on where the row starts.
  const auto parts = [&](int64_t columns) { return columns * t.inputs * t.element / (ranks * kTwoPassPartBytes); };
  const int64_t least = parts(f.columns - 2 * t.elements_of_vector()), most = parts(f.columns);

  RowChoice c =
      made(RowKernel::two_pass, form, "a long row in registers and shared memory of two or three blocks per SM");
  c.unaligned = true, c.vectors = 2 / t.inputs, c.threads = kTwoPassThreads;
  c.blocks_per_row = static_cast<int>(ranks);
  c.scope = ranks > 1 ? Scope::cluster : Scope::block;
  c.blocks_per_sm = ranks == 1 && t.inputs == 1 && least < 4 ? 3 : 2;
  // Clusters with three parts in registers, not four: the rest of the row then arrives at once. Gradients of 151643
  // bfloat16 columns at 0.91 of a copy against 0.65, softmax at 0.90 against 0.79. Float32 softmax is faster with four.
  c.kept_parts = ranks > 1 ? (t.inputs == 1 && t.element == 4 ? 4 : 3) : t.inputs == 2 ? 3 : least < 4 ? 1 : 4;
  if (ranks == 1 && t.inputs == 2 && least < 4) return {};
  // Leaves room for the kernel's static shared memory. With 3 KiB gradients hold a part fewer: 43000 bfloat16 columns
  // at 0.95 of a copy, 0.93 otherwise.
  const int64_t room =
      f.device.shared_per_multiprocessor / c.blocks_per_sm - (t.inputs == 1 && ranks == 1 ? 2048 : 3072);
  // No more than needed: the rest serves as L1, through which registers are filled (50257 bfloat16 columns at 0.99 of a
  // copy, 0.80 if all is taken).
  const int64_t slots = std::min(room / kTwoPassPartBytes, most + 1 - c.kept_parts);
  if (least < c.kept_parts || slots < 1) return {};
  c.waiting_parts = static_cast<int>(slots - 1);
  c.shared = slots * kTwoPassPartBytes;
  return offered_with_room(c);
}

// ------------------------------------------------------------------------------------------------ persistent_unaligned

Candidate Candidates::unaligned_team(const RowTraits& t, int vectors, int64_t threads, Scope scope) const {
  RowChoice c = made(RowKernel::persistent_unaligned, RowForm::only,
                     "a thread keeps its columns and their constants from row to row");
  c.unaligned = true, c.scope = scope, c.vectors = vectors, c.threads = static_cast<int>(threads);
  c.rows_per_block = scope == Scope::warp ? kUnalignedWarps * 32 / c.threads : 1;
  c.shared = std::max<int64_t>(int64_t{16} * vectors * t.constants * threads * c.rows_per_block,
                               t.column_sums && scope == Scope::warp ? 8 * f.columns : 0);
  return offered_with_room(c);
}

// Not for rows at varying distances, rows so short that most threads would be idle, rows too long for a block, and
// constants that do not fit in shared memory. Half warps come first, each thread with as much as it can hold, since two
// rows then share an instruction (layer norm of 577 bfloat16 columns at 0.82 of a copy, 0.73 with a warp per row).
Candidate Candidates::persistent_unaligned() const {
  const RowTraits t = traits_of(f, RowForm::only);
  const int elements = t.elements_of_vector(), most_threads = persistent_unaligned_threads(t.column_sums);
  const int64_t fewest = elements == 8 ? 8 : 24;  // whole vectors
  // Whole vectors of a row, depending on its alignment.
  const int64_t least = (f.columns - elements + 1) / elements, most = f.columns / elements;
  if (!f.constant_step || least < fewest || most > most_threads * 8 / t.inputs) return {};
  const auto takes = [&](int64_t threads, int held) {
    // With float32 column sums warps leave more threads idle than the general kernels. They pay off if at most an
    // eighth is idle.
    const bool full = elements == 8 || !t.column_sums || threads > 32 || 8 * most >= 7 * held * threads;
    return full && (held - 1) * threads <= least && most <= held * threads;
  };
  const auto warps = [&](int lanes, std::initializer_list<int> vectors) -> Candidate {
    for (const int held : vectors)
      if (takes(lanes, held))
        if (const Candidate c = unaligned_team(t, held, lanes, Scope::warp)) return c;
    return {};
  };
  // The number of threads that leaves the fewest slots empty.
  const auto block = [&](int64_t limit, std::initializer_list<int> vectors) -> Candidate {
    int best = 0;
    int64_t threads = 0;
    for (const int held : vectors) {
      const int64_t wanted = warps_of(up_to(most, held));
      if (wanted > limit || !takes(wanted, held) || (best > 0 && held * wanted >= best * threads)) continue;
      best = held, threads = wanted;
    }
    return best > 0 ? unaligned_team(t, best, threads, Scope::block) : Candidate();
  };
  if (t.column_sums) {  // for longer rows one small block would fill a multiprocessor's registers
    if (most > (elements == 8 ? 512 : 768)) return {};
    if (const Candidate c = warps(16, {1, 2})) return c;
    if (const Candidate c = warps(32, {2, 3, 4})) return c;
    return block(most_threads, {3, 4});
  }
  if (t.inputs == 2) {
    if (const Candidate c = warps(16, {1, 2, 3, 4})) return c;
    if (const Candidate c = warps(32, {3, 4})) return c;
    return block(most_threads, {4, 3});
  }
  if (const Candidate c = warps(16, {1, 2, 3, 4, 5, 6, 7, 8})) return c;
  if (const Candidate c = warps(32, {5, 6, 7, 8})) return c;
  if (elements == 8) return block(most_threads, {6, 5, 8});
  // 352 threads per multiprocessor are too few: layer norm of 8191 columns at 0.75 of a copy, 0.87 with the general
  // kernels.
  if (const Candidate c = block(256, {6, 5})) return c;
  return block(256, {4});
}

// ------------------------------------------------------------------------------------------------------ staged, direct

// A warp per row, whose lanes hold N elements at most.
Candidate Candidates::direct(RowForm form) const {
  if (up_to(f.rows, kTileWarps) > INT32_MAX) return {};
  for (const int held : kDirect) {
    if (f.columns > 32 * held) continue;
    RowChoice c = made(RowKernel::direct, form, "each float32 element is as wide as a lane's share of a transaction");
    c.scope = Scope::warp, c.elements = 1, c.unaligned = true, c.vectors = held, c.threads = 32;
    c.rows_per_block = kTileWarps, c.lanes = 32;
    return offered(c);
  }
  return {};
}

// Tiles of rows, of which `lanes` lanes share one and hold `held` elements each.
Candidate Candidates::tile(RowForm form, const RowTraits& t, int tensors, int lanes, int held) const {
  if (f.columns > lanes * held) return {};
  const bool wide = t.element == 4;
  const int teams = 32 / lanes, target = wide && t.column_sums ? 3072 : 2048;  // bytes of one tensor of a tile
  const int64_t row_bytes = f.columns * t.element;
  // Rows per tile: enough bytes per memory latency, but fewer if warps would have no rows.
  const int64_t warps = int64_t{24} * f.device.multiprocessors;
  const int64_t each = teams * std::clamp<int64_t>(f.rows / (teams * warps), 1, up_to(target, teams * row_bytes));
  const int64_t region = up_to(each * row_bytes + 16, 16) * 16;
  const int64_t stage = tensors * region + (t.number ? up_to(each, 4) * 16 : 0);
  RowChoice c =
      made(RowKernel::staged, form, "short unaligned rows are copied to shared memory, whatever their boundaries");
  c.scope = Scope::warp, c.elements = 1, c.unaligned = true, c.vectors = held, c.lanes = lanes;
  c.threads = 32 * kTileWarps;
  c.shared = std::max<int64_t>(kTileWarps * kTileStages * stage, t.column_sums ? 8 * f.columns : 0);
  c.tile_rows = static_cast<int>(each), c.tile_tensor_bytes = static_cast<int>(region);
  c.tile_bytes = static_cast<int>(stage);
  const Candidate offer = offered_with_room(c);
  if (!offer || t.column_sums) return offer;  // tiles_per_warp depends on the resident blocks
  // More tiles per warp with more constants to load or masks to look up (added mask, 131 columns: .88 of a copy, .83
  // with fewer).
  const bool looks_up = form == RowForm::any_mask && f.mask != MaskKind::none;
  c.tiles_per_warp = wide ? 1 : t.constants == 2 || looks_up ? 4 : 2;
  if (up_to(f.rows, each * kTileWarps * c.tiles_per_warp) > INT32_MAX) return {};
  return offered(c);
}

Candidate Candidates::staged(RowForm form, int tensors, int limit) const {
  const RowTraits t = traits_of(f, form);
  const int most = staged_columns(t, std::min(limit, t.staged));
  if (f.columns > most || !f.adjacent) return {};
  if (has_direct(t) && f.columns > 160) return direct(form);
  for (const StagedRow& row : kStaged)
    if (has_staged(t, most, row))
      if (const Candidate c = tile(form, t, tensors, row.lanes, row.held)) return c;
  return {};
}

// ------------------------------------------------------------------------------------------------ norm_backward_stream

Candidate Candidates::norm_backward_stream() const {
  const auto with = [&]<int element>() -> Candidate {
    using P = StreamPlan<element>;
    if (!f.constant_step || f.columns > INT32_MAX / 4 || !f.vectors) return {};
    if (!f.device.sm90 || f.rows > INT32_MAX / 2) return {};
    if (f.device.shared_per_multiprocessor < int64_t{P::kBlocks} * (P::kBytes + 2048)) return {};
    RowChoice c = made(RowKernel::norm_backward_stream, RowForm::only, "");
    c.vectors = P::kHeld, c.threads = P::kThreads, c.shared = P::kBytes, c.stages = P::kStages;
    const int64_t vectors = f.columns / P::kVectors, resident = int64_t{f.device.multiprocessors} * P::kBlocks;
    if (f.whole) {
      const int64_t blocks = up_to(f.columns, int64_t{P::kPart} * P::kVectors);
      if (f.columns <= (element == 2 ? 32768 : 65536) || blocks > kMostStreamBlocks) return {};
      c.why = "blocks share rows that are too long for a cluster to prefetch the next one";
      c.blocks_per_row = static_cast<int>(blocks);
      c.teams = static_cast<int>(std::min(resident / blocks, f.rows));
    } else {
      if (element != 2 || vectors > P::kPart || vectors <= P::kPart * 3 / 4) return {};
      c.why = "unaligned 16-bit rows of middle length, a block per row";
      c.unaligned = true;
      c.teams = static_cast<int>(std::min<int64_t>(resident / P::kVectors * P::kVectors, f.rows));
    }
    return c.teams > 0 ? offered(c) : Candidate();
  };
  if (f.element == 8) return {};
  return f.element == 2 ? with.template operator()<2>() : with.template operator()<4>();
}

}  // namespace matmuls
