// Device helpers: aligned vectors and approximate functions.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "scalar_types.h"

namespace matmuls {

// V elements moved by one load or store of up to 16 bytes.
template <class T, int V>
struct alignas(sizeof(T) * V) Vec {
  T at[V];
};

// A vector as numbers and back, two 16-bit ones an instruction or two.
template <class T, int V, class F>
__device__ void unpack(const Vec<T, V>& vector, F (&values)[V]) {
  if constexpr (sizeof(T) == 2 && V % 2 == 0) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&vector);
#pragma unroll
    for (int p = 0; p < V / 2; ++p) {
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        values[2 * p] = __uint_as_float(pairs[p] << 16);
        values[2 * p + 1] = __uint_as_float(pairs[p] & 0xffff0000u);
      } else {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(pairs[p]));
        values[2 * p] = two.x;
        values[2 * p + 1] = two.y;
      }
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = F(vector.at[v]);
  }
}
template <class T, class F, int V>
__device__ Vec<T, V> pack(const F (&values)[V]) {
  Vec<T, V> vector;
  if constexpr (sizeof(T) == 2 && V % 2 == 0) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(&vector);
#pragma unroll
    for (int p = 0; p < V / 2; ++p) {
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(values[2 * p], values[2 * p + 1]);
        pairs[p] = reinterpret_cast<const uint32_t&>(two);
      } else {
        const __half2 two = __floats2half2_rn(values[2 * p], values[2 * p + 1]);
        pairs[p] = reinterpret_cast<const uint32_t&>(two);
      }
    }
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) vector.at[v] = T(values[v]);
  }
  return vector;
}

// V numbers as the words of memory that hold them: kept so, 16-bit numbers take half a register each.
template <class T, int V>
struct Words {
  static constexpr int kCount = static_cast<int>(V * sizeof(T) + 3) / 4;
  uint32_t at[kCount];
};
template <class T, int V, class F>
__device__ void unpack(const Words<T, V>& words, F (&values)[V]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const uint32_t bits = v % 2 ? words.at[v / 2] >> 16 : words.at[v / 2] & 0xffffu;
      if constexpr (std::is_same_v<T, c10::BFloat16>)
        values[v] = __uint_as_float(bits << 16);
      else
        values[v] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int v = 0; v < V; ++v) values[v] = __uint_as_float(words.at[v]);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v)
      values[v] = __hiloint2double(static_cast<int>(words.at[2 * v + 1]), static_cast<int>(words.at[2 * v]));
  }
}

template <class T, int V>
__device__ Words<T, V> load_aligned(const T* from) {
  Words<T, V> words{};
  if constexpr (V * sizeof(T) == 16) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    words = {four.x, four.y, four.z, four.w};
  }
  return words;
}

// V numbers that nobody writes meanwhile, from any address a multiple of their size: the loads may move past stores,
// which would otherwise wait for one another through them.
template <class T, int V>
__device__ Words<T, V> load_constant(const T* from) {
  Words<T, V> words;
  if constexpr (sizeof(T) == 2) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    const uint32_t* aligned = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    if (V % 2 == 0 && address % 4 == 0) {
#pragma unroll
      for (int w = 0; w < Words<T, V>::kCount; ++w) words.at[w] = __ldg(aligned + w);
    } else if (V % 2 == 0) {  // every word from two
      uint32_t low = __ldg(aligned);
#pragma unroll
      for (int w = 0; w < Words<T, V>::kCount; ++w) {
        const uint32_t high = __ldg(aligned + w + 1);
        words.at[w] = __funnelshift_r(low, high, 16);
        low = high;
      }
    } else {
      words.at[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
    }
  } else {
#pragma unroll
    for (int w = 0; w < Words<T, V>::kCount; ++w) words.at[w] = __ldg(reinterpret_cast<const uint32_t*>(from) + w);
  }
  return words;
}

// A store that leaves the L1 to what is read again.
template <class T, int V>
__device__ void store_past_l1(Vec<T, V>* to, const Vec<T, V>& vector) {
  if constexpr (sizeof(Vec<T, V>) == 16) {
    const int4& bits = reinterpret_cast<const int4&>(vector);
    asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y),
                 "r"(bits.z), "r"(bits.w)
                 : "memory");
  } else {
    *to = vector;
  }
}

// The larger one; NaN only where both are.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

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

// e^x for a softmax: what differs from 0 in the result differs from it here.
constexpr float kLog2e = 1.44269504f;
__device__ inline float exp_of(float x) { return exp2_approx(x * kLog2e); }
__device__ inline double exp_of(double x) { return exp(x); }

}  // namespace matmuls
