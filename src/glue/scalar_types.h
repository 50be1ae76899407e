// arithmetic_t: the type in which a storage type is computed. float16 and bfloat16 are computed in float32.
#pragma once

namespace matmuls {

template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};
template <class T>
using arithmetic_t = typename Arithmetic<T>::type;

}  // namespace matmuls
