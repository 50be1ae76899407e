// Device helpers: aligned vectors and the arithmetic type of each storage type.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace matmuls {

// V elements moved by one load or store of up to 16 bytes.
template <class T, int V>
struct alignas(sizeof(T) * V) Vec {
  T at[V];
};

// float16 and bfloat16 are computed in float32.
template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};

// 2^x and 1/x to 2 units in the last place, one instruction each: denormals flush, which spares the scaling around it.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace matmuls
