// Powers of two that bring float32 numbers into float16's range, and how what is kept of a matrix lies in memory.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "sparse/spmm/densified/densified.h"
#include "sparse/spmm/fill_facts.cuh"

namespace matmuls {

constexpr unsigned kInfinite = 0x7f800000;  // the bits of a magnitude that is not finite, or more

// The power that brings a magnitude with these bits into [2^14, 2^15), at most 126.
__device__ inline int exponent_for(unsigned bits) {
  const int field = static_cast<int>(bits >> 23);
  return bits == 0 || bits >= kInfinite ? 0 : min(14 + 127 - field, 126);
}
__device__ inline float power_of_two(int e) { return __uint_as_float(static_cast<unsigned>(e + 127) << 23); }
// After scaling.
__device__ inline bool is_tiny(float x) { return x != 0 && fabsf(x) < 1.f / (1 << 14); }
__device__ inline bool is_large(float x) { return fabsf(x) >= 1 << 7; }

// What two of four keep of kTileRows x kStepColumns of A, as shared memory and tensor cores take it (gpu/hopper.cuh).
// Where of its four columns each of a pair lies, 2 bits each: [16 rows][row % 8][16 columns][row / 8 % 2][8 columns].
using PairPlaces = unsigned char[kTileRows / 16][8][4][2][2];
struct StepOfTile {
  // Of a row the 32 high halves, then the low ones; piece p of row r at p ^ r % 8.
  uint4 numbers[kTileRows][8];
  PairPlaces places;
};
struct NarrowStepOfTile {
  uint4 numbers[kTileRows][4];  // of a row the 32; piece p of row r at p ^ r / 2 % 4
  PairPlaces places;
};
static_assert(sizeof(StepOfTile) == 2 * kStepHalves && sizeof(NarrowStepOfTile) == 2 * kNarrowStepHalves);

// Two numbers as high + low / 2^12.
__device__ inline void split_two(float x, float y, uint32_t& high, uint32_t& low) {
  const __half2 big = __floats2half2_rn(x, y);
  const float2 near = __half22float2(big);
  const __half2 rest = __floats2half2_rn((x - near.x) * kLowScale, (y - near.y) * kLowScale);
  high = reinterpret_cast<const uint32_t&>(big), low = reinterpret_cast<const uint32_t&>(rest);
}

// x * 2^e for e from -252 to 252.
__device__ inline float times_power_of_two(float x, int e) {
  const int half = e >> 1;
  return x * power_of_two(half) * power_of_two(e - half);
}

}  // namespace matmuls
