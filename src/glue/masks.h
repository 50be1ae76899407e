// Kinds of softmax masks.
#pragma once

namespace matmuls {

// bytes: bool or uint8, nonzero elements are masked. same (the input's dtype) and float32: added to the scaled input,
// -inf masks.
enum class MaskKind { none, bytes, same, float32 };

}  // namespace matmuls
