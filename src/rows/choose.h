// Chooses the GPU kernel of every operation on rows: softmax with and without masks, layer and RMS norm, and their
// gradients. Pure host code without CUDA headers: tests and explain() choose for any GPU on any machine.
#pragma once

#include <cstdint>
#include <string_view>

#include "glue/masks.h"
#include "rows/kernel_sizes.h"

namespace matmuls {

enum class RowOperation { softmax, scaled_masked_softmax, softmax_backward, layer_norm, rms_norm, norm_backward };

// The kernels. Each has the name of its file in rows/kernels/, and explain() prints that name.
enum class RowKernel {
  one_pass,              // a row per block, warp or part of a warp, in registers
  even_rows,             // one_pass whose vectors per thread are a compile-time constant
  nearly_even,           // the same for a block whose threads lack at most one vector
  two_pass,              // a row in registers and shared memory of small blocks; the rest is read twice
  persistent,            // resident blocks loop over the rows, with the next ones in flight
  persistent_unaligned,  // the same for unaligned rows and constants, with the next row in registers
  cluster,               // a resident cluster of blocks per row, for long rows
  staged,                // several short unaligned rows in shared memory
  direct,                // a short unaligned float32 row per warp, element by element
  reread,                // rows of any length are read twice
  norm_backward_stream,  // norm_backward, resident blocks that share long rows or stream unaligned ones
  column_sums,           // norm_backward without dx: only the sums over the rows
};
constexpr int kRowKernels = static_cast<int>(RowKernel::column_sums) + 1;

// How the operation is computed, where there are several ways.
enum class RowForm {
  only,
  in_registers,    // softmax: exponentials stay in registers
  computed_twice,  // softmax: exponentials are computed for their sum and again for the result
  any_mask,        // masked softmax: elements of any mask, one at a time
  vector_mask,     // masked softmax: vectors of one type of mask
  half2,           // masked softmax: 16-bit byte-masked or causal rows in packed arithmetic
  few_vectors,     // softmax_backward: two vectors per thread of each input, else four
};

// Limits of a GPU. shared memory in bytes.
struct RowDevice {
  int multiprocessors;
  int64_t shared_per_block, shared_per_multiprocessor;
  bool sm90;  // it runs sm_90 code: clusters
};

struct RowFacts {
  RowOperation operation;
  int element;  // bytes: 2, 4 or 8
  int64_t rows, columns;
  bool constant_step;  // all rows are at a constant distance
  bool adjacent;       // every row follows the previous one without a gap
  // Accesses as 16-byte vectors. vectors: columns are contiguous and each row has the same misalignment in all tensors;
  // aligned: that misalignment is 0; whole: also the row's length is a multiple of 16 bytes.
  bool vectors, aligned, whole;
  // Softmax.
  MaskKind mask = MaskKind::none;
  bool causal = false;
  double scale = 1;
  bool mask_vectors = true;  // mask rows can be read by the vectors of x, or there is none
  bool mask_steps = false;   // the mask's columns are not contiguous
  // Norms. plain_constants: weight (and bias) exist and are aligned. keeps: the normalized row is written too.
  bool residual = false, keeps = false, plain_constants = false;
  bool wants_dx = true;  // norm_backward
  RowDevice device;
};

struct RowChoice {
  RowKernel kernel;
  const char* why;
  RowForm form = RowForm::only;
  Scope scope = Scope::block;
  int elements = 1;                           // of one access: 16 bytes, or 1
  bool unaligned = false;                     // vectors reach, or elements lie, outside the aligned part of a row
  int vectors = 0;                            // accesses per thread, of each input
  int threads = 0;                            // of a block, per row; of a staged block in all
  int rows_per_block = 1;                     // that a block processes at the same time
  int blocks_per_row = 1;                     // of the cluster, or of the team of blocks that shares a row
  int64_t shared = 0;                         // dynamic shared memory of a block in bytes
  bool exact = false;                         // even_rows: every thread has all its vectors
  int stages = 0;                             // persistent: rows in shared memory
  int kept_parts = 0;                         // two_pass: parts in registers
  int waiting_parts = 0;                      // two_pass: parts in shared memory, besides the remainder
  int blocks_per_sm = 0;                      // two_pass
  int lanes = 0;                              // staged: of a warp, per row
  int tile_rows = 0, tiles_per_warp = 0;      // staged; 0 tiles: as many as resident blocks need
  int tile_tensor_bytes = 0, tile_bytes = 0;  // staged: one tensor of a tile, all of them
  int teams = 0;                              // norm_backward_stream: of blocks that share a row
};

// True if a kernel is compiled for an operation, by its traits: for unaligned rows, or for aligned ones.
constexpr bool has_kernel(const RowTraits& t, RowKernel kernel, bool unaligned) {
  switch (kernel) {
    case RowKernel::even_rows: return unaligned ? t.unaligned_warps : !t.even.empty();
    case RowKernel::nearly_even: return !t.nearly_even.empty() && !(unaligned && t.constants > 0);
    case RowKernel::cluster: return unaligned ? t.unaligned_cluster : t.clusters(t.elements_of_vector());
    case RowKernel::two_pass: return unaligned && t.two_pass;
    case RowKernel::staged: return unaligned && t.staged > 0;
    case RowKernel::direct: return unaligned && has_direct(t);
    case RowKernel::persistent_unaligned: return unaligned && t.persistent_unaligned();
    case RowKernel::norm_backward_stream:
    case RowKernel::column_sums: return true;  // launched by norm_backward alone
    case RowKernel::one_pass:
    case RowKernel::persistent:
    case RowKernel::reread: return !unaligned || !t.whole_rows;
  }
  return false;
}

// True if an instance of its kernel is that of the choice.
inline bool is(int vectors, const RowChoice& c) { return vectors == c.vectors; }
inline bool is(const EvenRows& k, const RowChoice& c) {
  return k.vectors == c.vectors && k.threads == c.threads && k.exact == c.exact;
}
inline bool is(const TwoPass& k, const RowChoice& c) {
  return k.kept_parts == c.kept_parts && k.blocks_per_sm == c.blocks_per_sm && k.scope == c.scope;
}
inline bool is(const StagedRow& k, const RowChoice& c) { return k.lanes == c.lanes && k.held == c.vectors; }

// True if the GPU has room for a block, or a cluster, of the choice.
using HasRoom = bool (*)(const RowFacts&, const RowChoice&);
// By the limits of the device and an upper bound of the kernels' static shared memory. Launches ask CUDA instead.
bool has_room_by_limits(const RowFacts& facts, const RowChoice& choice);
// Kernels whose blocks may not fit on a GPU. The others need few threads and no dynamic shared memory.
constexpr bool needs_room(RowKernel kernel) {
  return kernel == RowKernel::persistent || kernel == RowKernel::persistent_unaligned || kernel == RowKernel::cluster ||
         kernel == RowKernel::staged || kernel == RowKernel::two_pass;
}

// The kernel of an operation, and its launch parameters: the first in the operation's list that takes the rows.
RowChoice choose(const RowFacts& facts, HasRoom has_room = has_room_by_limits);

// The grid of a choice. resident: blocks, or clusters, that the GPU runs at once; used by persistent kernels only.
struct RowGrid {
  int64_t blocks;
  int64_t teams;       // groups of threads that have column sums of their own
  int tiles_per_warp;  // staged
};
RowGrid grid_of(const RowFacts& facts, const RowChoice& choice, int64_t resident);

// What the operation's code is compiled for, in this form.
RowTraits traits_of(const RowFacts& facts, RowForm form);
// True if the kernel of a choice is compiled, by the lists that launches expand (rows/launch_rows.cuh).
bool is_compiled(const RowFacts& facts, const RowChoice& choice);

std::string_view name_of(RowKernel kernel);
std::string_view name_of(RowForm form);
std::string_view name_of(Scope scope);

}  // namespace matmuls
