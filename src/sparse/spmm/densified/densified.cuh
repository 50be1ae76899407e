// Memory layout of densified matrices, and arithmetic that splits a float32 number into two float16 (densified.h).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "sparse/spmm/densified/densified.h"
#include "sparse/spmm/fit_flags.cuh"

namespace matmuls {

constexpr unsigned kInfinite = 0x7f800000;  // bits of infinity: magnitudes with these bits or more are not finite

// The exponent e, at most 126, for which x * 2^e lies in [2^14, 2^15), x a magnitude with these bits.
__device__ inline int exponent_for(unsigned bits) {
  const int field = static_cast<int>(bits >> 23);
  return bits == 0 || bits >= kInfinite ? 0 : min(14 + 127 - field, 126);
}
__device__ inline float power_of_two(int e) { return __uint_as_float(static_cast<unsigned>(e + 127) << 23); }
// For numbers after scaling: below 2^-28, at least 2^-8 of the largest of the row of A or column of B.
__device__ inline bool is_tiny(float x) { return x != 0 && fabsf(x) < 1.f / (1 << 14); }
__device__ inline bool is_large(float x) { return fabsf(x) >= 1 << 7; }

// One step of 2:4 storage: kTileRows x kStepColumns of A with two of every four columns kept, as shared memory and
// wgmma take it (gpu/hopper.cuh). A row's 64 columns keep 32 numbers.
//
//   StepOfTile (float32), row r: 8 pieces of 16 bytes, piece p stored at p ^ r % 8 (128-byte swizzle)
//     | high: kept of columns 0-15 | 16-31 | 32-47 | 48-63 | low: 0-15 | 16-31 | 32-47 | 48-63 |
//   NarrowStepOfTile (16 bits), row r: 4 pieces of 16 bytes, piece p stored at p ^ r / 2 % 4 (64-byte swizzle)
//     | kept of columns 0-15 | 16-31 | 32-47 | 48-63 |
//
// PairPlaces, the sparsity metadata: [row / 16][row % 8][column / 16][row / 8 % 2][column / 8 % 2], a byte for 8
// columns: for each four of them, lower nibble first, the position (2 bits) of the first and of the second kept number.
using PairPlaces = unsigned char[kTileRows / 16][8][4][2][2];
struct StepOfTile {
  // Per row 32 high halves, then 32 low halves; swizzled as above.
  uint4 numbers[kTileRows][8];
  PairPlaces places;
};
struct NarrowStepOfTile {
  uint4 numbers[kTileRows][4];  // 32 numbers
  PairPlaces places;
};
static_assert(sizeof(StepOfTile) == 2 * kStepElements && sizeof(NarrowStepOfTile) == 2 * kNarrowStepElements);

// Splits two numbers into high + low / 2^12, each in float16.
__device__ inline void split_two(float x, float y, uint32_t& high, uint32_t& low) {
  const __half2 big = __floats2half2_rn(x, y);
  const float2 near = __half22float2(big);
  const __half2 rest = __floats2half2_rn((x - near.x) * kLowScale, (y - near.y) * kLowScale);
  high = reinterpret_cast<const uint32_t&>(big), low = reinterpret_cast<const uint32_t&>(rest);
}

// x * 2^e for e from -252 to 252, where 2^e itself may not be a float32.
__device__ inline float times_power_of_two(float x, int e) {
  const int half = e >> 1;
  return x * power_of_two(half) * power_of_two(e - half);
}

}  // namespace matmuls
