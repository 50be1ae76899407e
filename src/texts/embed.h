// The embeddings of tokens, as BERT's family makes them: rows of the tables of words, positions and token types, added
// and layer-normed. On a GPU alone, in one kernel. The sum is not rounded ahead of the norm.
#pragma once

#include "glue/checks.h"

namespace matmuls {

// ids [...] in Long, of rows of words [V, D]; position_ids of positions [P, D]; type_ids of types [N, D], null for
// row 0 -> [..., D] = layer_norm(words[ids] + types[type_ids] + positions[position_ids]) with weight and bias [D]
at::Tensor embed(const at::Tensor& ids, const at::Tensor& words, const at::Tensor& position_ids,
                 const at::Tensor& positions, const OptionalTensor& type_ids, const at::Tensor& types,
                 const at::Tensor& weight, const at::Tensor& bias, double eps);

namespace texts {

struct Table {
  const void* rows;
  const int64_t* ids;  // null: row 0
  int64_t count;
};

struct Embedding {
  Table tables[3];
  const void *weight, *bias;
  void* out;
  int64_t tokens, columns;
  double eps;
};

constexpr int kEmbedThreads = 128, kMostVectors = 4;  // of a row; vectors of 16 bytes a thread
void embed_on_gpu(const Embedding& e, at::ScalarType dtype);

}  // namespace texts
}  // namespace matmuls
