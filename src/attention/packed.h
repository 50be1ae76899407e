// Attention of packed texts, for inference: each token sees tokens of its own segment.
//
//   queries  0 3 3 7     rows 0 1 2 of q see the keys 0 1 2, the key 3 has no queries, rows 3 to 6 see the keys 4 to 6
//   keys     0 3 4 7
#pragma once

#include "glue/checks.h"

namespace matmuls {

// q [T, H, D], k and v [keys, h, D] with h a divisor of H -> [T, H * D]. The queries from queries[i] to queries[i + 1]
// see the keys from keys[i] to keys[i + 1], of these the ones at most `left` before and `right` after the query's place
// (-1: all), where the last query is at the last key's place. The context of a query that sees none is 0. Rows of no
// segment are undefined. longest: the most queries of a segment. On a GPU alone, from sm_80 on, in float16 or bfloat16
// and with D of 32, 64, 80, 96 or 128.
at::Tensor attend_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& queries,
                         const at::Tensor& keys, int64_t longest, double scale, int64_t left, int64_t right);

namespace packed {

struct Heads {
  const void* data;
  int64_t row, head;  // strides in elements; those of a head are adjacent
};

struct Call {
  Heads q, k, v;
  void* context;
  const int32_t *queries, *keys;  // [segments + 1]
  int segments, heads, sharing;   // sharing: heads of q for one of k
  int longest, left, right;
  float scale;  // includes the factor log2(e)
};
void attend_on_gpu(const at::Tensor& q, const Call& call);

}  // namespace packed
}  // namespace matmuls
