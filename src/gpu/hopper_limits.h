// Limits of Hopper GPUs that host code needs in builds without CUDA too.
#pragma once

namespace matmuls {

constexpr int kHopperBlockBytes = 226 << 10;  // shared memory of one block: 227 KiB at most, 1 KiB for static variables

}  // namespace matmuls
