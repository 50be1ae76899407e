// The tokens of padded texts that are computed, one text after the other, with their positions and where each text
// begins; and their hidden states, put back in place. On a GPU alone, in one kernel each: the host does not read the
// mask.
//
//   ids    a b .  |  c . .  |  . d e        . is hidden, and the first token of a text is always computed
//   packed a b c . d e                      place 0 1 -1 | 2 -1 -1 | 3 4 5
#pragma once

#include "glue/checks.h"

namespace matmuls {

// ids, mask, types [B, S] -> packed, positions, packed_types [1, size], place [>= B * S] and starts [2, 1 + texts], or
// [2, 1 + 2 * texts] with a mask.
void pack_padded(const at::Tensor& ids, const OptionalTensor& mask, const OptionalTensor& types, int64_t padding,
                 const at::Tensor& packed, const at::Tensor& positions, const OptionalTensor& packed_types,
                 const at::Tensor& place, const at::Tensor& starts);
// states [T, width], place -> [batch, length, width], zero where place is -1
at::Tensor unpack_padded(const at::Tensor& states, const at::Tensor& place, int64_t batch, int64_t length);

namespace texts {

struct Strided {
  const void* data;
  int64_t row, column;  // strides in elements
};

struct Padded {
  Strided ids, mask, types;  // int64; mask_bytes per element, data null for none; int64, data null for zeros
  int mask_bytes, batch, length;
  int64_t padding;  // RoBERTa's padding id, by which it numbers the tokens; -1: their columns

  template <class T>
  C10_HOST_DEVICE T at(const Strided& s, int row, int column) const {
    return static_cast<const T*>(s.data)[row * s.row + column * s.column];
  }
  C10_HOST_DEVICE bool shown(int row, int column) const {
    if (mask.data == nullptr) return true;
    if (mask_bytes == 1) return at<int8_t>(mask, row, column) != 0;
    return mask_bytes == 4 ? at<int32_t>(mask, row, column) != 0 : at<int64_t>(mask, row, column) != 0;
  }
};

// Tokens ahead of one.
struct Counts {
  int computed, numbered;  // numbered: those whose id is not padding
};

struct Packed {
  int64_t *ids, *positions, *types;  // [size]; types may be null
  int32_t* place;                    // [batch * length]: the packed token, or -1
  int32_t *queries, *keys;           // [1 + texts] or [1 + 2 * texts]: where segments of attention begin
  int size, texts;
  bool pairs;  // a text is two segments: a hidden first token's key without queries, and the others

  C10_HOST_DEVICE void set(int at, int64_t id, int64_t position, int64_t type) const {
    ids[at] = id, positions[at] = position;
    if (types) types[at] = type;
  }
  // The segments of a text that ends ahead of packed token `end`.
  C10_HOST_DEVICE void segment(int text, int begin, int end, bool hidden) const {
    if (pairs) queries[2 * text + 1] = begin, keys[2 * text + 1] = begin + hidden;
    const int at = (1 + pairs) * (text + 1);
    queries[at] = keys[at] = end;
  }
};

C10_HOST_DEVICE inline Counts operator+(Counts a, Counts b) {
  return {a.computed + b.computed, a.numbered + b.numbered};
}
C10_HOST_DEVICE inline Counts count_token(const Padded& in, int row, int column) {
  return {column == 0 || in.shown(row, column), in.at<int64_t>(in.ids, row, column) != in.padding};
}
// Writes one token. before: tokens ahead of it; text: tokens ahead of its text.
C10_HOST_DEVICE inline void pack_token(const Padded& in, const Packed& out, int row, int column, Counts before,
                                       Counts text) {
  const Counts own = count_token(in, row, column);
  out.place[row * in.length + column] = own.computed ? before.computed : -1;
  if (!own.computed) return;
  const int64_t number = own.numbered ? before.numbered + 1 - text.numbered : 0;
  out.set(before.computed, in.at<int64_t>(in.ids, row, column), in.padding < 0 ? column : in.padding + number,
          in.types.data ? in.at<int64_t>(in.types, row, column) : 0);
}

constexpr int64_t kMostTexts = 4096;      // 32 KiB of shared memory
constexpr int64_t kMostTokens = 1 << 30;  // a thread's places are ints, and go up to a block's step past the last one
void pack_on_gpu(const Padded& in, const Packed& out);
void unpack_on_gpu(const at::Tensor& states, const int32_t* place, const at::Tensor& out);

}  // namespace texts
}  // namespace matmuls
