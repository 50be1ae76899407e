// For each kernel of rows/kernels/: whether it can take the rows of a call, and with which launch parameters. The lists
// of rows/choose.cpp are made of these candidates. A candidate that does not take the rows is empty.
#pragma once

#include <climits>
#include <optional>

#include "rows/choose.h"

namespace matmuls {

using Candidate = std::optional<RowChoice>;

class Candidates {
 public:
  Candidates(const RowFacts& facts, HasRoom has_room) : f(facts), has_room_(has_room) {}

  // One of the general kernels, by the number of vectors: one_pass, persistent, cluster or reread. Takes every row.
  RowChoice general(RowForm form = RowForm::only) const;

  // even_rows with this number of vectors for each of `threads` threads.
  Candidate even(RowForm form, int vectors, int threads, bool exact, const char* why) const;
  // even_rows, exactly four vectors for every thread.
  Candidate even_fours(RowForm form) const;
  // even_rows, two to three vectors for each of 4, 8, 16 or 32 threads.
  Candidate even_threes() const;
  // even_rows, a warp per row with five to eight vectors per lane.
  Candidate even_warps(RowForm form) const;
  // even_rows for unaligned rows: up to five whole vectors per lane of a warp, or four per lane of half a warp.
  Candidate unaligned_warps(RowForm form) const;
  // nearly_even, with the number of vectors per thread that leaves the fewest idle slots.
  Candidate nearly_even(RowForm form, bool unaligned) const;
  // two_pass: at least 16 KiB of a row per block, sm_90.
  Candidate two_pass(RowForm form) const;
  // cluster for unaligned rows of more than 2048 vectors.
  Candidate unaligned_cluster(RowForm form) const;
  // staged or direct: rows of at most `limit` columns that follow each other. tensors: of a tile, inputs first.
  Candidate staged(RowForm form, int tensors, int limit = INT_MAX) const;
  Candidate persistent_unaligned() const;
  Candidate norm_backward_stream() const;

 private:
  struct General;          // how a row is divided among threads
  struct PersistentBytes;  // shared memory of the persistent kernel

  RowChoice made(RowKernel kernel, RowForm form, const char* why) const;
  // The choice, unless its kernel is switched off.
  Candidate offered(const RowChoice& choice) const;
  // The same, unless the GPU has no room for it.
  Candidate offered_with_room(const RowChoice& choice) const;
  General divide(const RowTraits& t, int elements, bool unaligned) const;
  General divide_among_clusters(const RowTraits& t, int64_t vectors) const;
  bool too_many_blocks(const RowTraits& t, const General& g, bool unaligned) const;
  int stages_of(const RowTraits& t, const RowChoice& c, const PersistentBytes& bytes) const;
  Candidate cluster(RowForm form, const RowTraits& t, bool unaligned) const;
  Candidate direct(RowForm form) const;
  Candidate tile(RowForm form, const RowTraits& t, int tensors, int lanes, int elements) const;
  Candidate unaligned_team(const RowTraits& t, int vectors, int64_t threads, Scope scope) const;

  const RowFacts& f;
  HasRoom has_room_;
};

}  // namespace matmuls
