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

}  // namespace matmuls
