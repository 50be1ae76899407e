// What a softmax's mask may hold.
#pragma once

namespace matmuls {

// bytes: bool or uint8, where anything but 0 masks. same, float32: added to the scaled input, -inf masks.
enum class MaskKind { none, bytes, same, float32 };

}  // namespace matmuls
