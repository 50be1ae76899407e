// Vector loads, stores and conversions of device code, and small arithmetic helpers.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>
#include <type_traits>

#include "glue/scalar_types.h"
#include "gpu/ptx.cuh"

namespace matmuls {

// V elements moved by one load or store of up to 16 bytes.
template <class T, int V>
struct alignas(sizeof(T) * V) Vec {
  T at[V];
};

// V elements packed in 32-bit words; 16-bit elements take half a word each.
template <class T, int V>
struct Words {
  static constexpr int kCount = static_cast<int>(V * sizeof(T) + 3) / 4;
  uint32_t at[kCount];
};

template <class T, int V, class F>
__device__ void unpack(const Words<T, V>& words, F (&values)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      values[v] = __uint_as_float(v % 2 ? words.at[v / 2] & 0xffff0000u : words.at[v / 2] << 16);
    } else if constexpr (std::is_same_v<T, c10::Half>) {
      const uint32_t bits = v % 2 ? words.at[v / 2] >> 16 : words.at[v / 2];
      values[v] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    } else if constexpr (sizeof(T) == 4) {
      values[v] = __uint_as_float(words.at[v]);
    } else {
      values[v] = __hiloint2double(static_cast<int>(words.at[2 * v + 1]), static_cast<int>(words.at[2 * v]));
    }
  }
}
template <class T, int V, class F>
__device__ Words<T, V> pack(const F (&values)[V]) {
  Words<T, V> words;
#pragma unroll
  for (int v = 0; v < V; v += sizeof(T) == 2 && V > 1 ? 2 : 1) {
    if constexpr (sizeof(T) == 2) {
      const float low = values[v], high = V > 1 ? values[(v + 1) % V] : F(0);
      if constexpr (std::is_same_v<T, c10::BFloat16>) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
        words.at[v / 2] = reinterpret_cast<const uint32_t&>(two);
      } else {
        const __half2 two = __floats2half2_rn(low, high);
        words.at[v / 2] = reinterpret_cast<const uint32_t&>(two);
      }
    } else if constexpr (sizeof(T) == 4) {
      words.at[v] = __float_as_uint(values[v]);
    } else {
      words.at[2 * v] = static_cast<uint32_t>(__double2loint(values[v]));
      words.at[2 * v + 1] = static_cast<uint32_t>(__double2hiint(values[v]));
    }
  }
  return words;
}

template <class T>
__device__ Words<T, 1> load_one(const T* from) {
  Words<T, 1> words{};
  if constexpr (sizeof(T) == 2) {
    words.at[0] = *reinterpret_cast<const unsigned short*>(from);
  } else {
#pragma unroll
    for (int w = 0; w < Words<T, 1>::kCount; ++w) words.at[w] = reinterpret_cast<const uint32_t*>(from)[w];
  }
  return words;
}
// Loads one element, or V elements of 16 bytes from a 16-byte aligned address, if `there`; else 0.
template <class T, int V>
__device__ Words<T, V> load_if(bool there, const T* from, ptx::L2Policy policy) {
  if constexpr (V * sizeof(T) == 16) {
    const uint4 four = ptx::load_if(there, reinterpret_cast<const uint4*>(from), policy);
    return {four.x, four.y, four.z, four.w};
  } else {
    static_assert(V == 1);
    return there ? load_one(from) : Words<T, 1>{};
  }
}
template <class T, int V>
__device__ void store_vector(T* to, const Words<T, V>& words) {
  static_assert(V * sizeof(T) == 16);
  ptx::store(to, {words.at[0], words.at[1], words.at[2], words.at[3]});
}
template <class T, int V>
__device__ void store_once(T* to, const Words<T, V>& words) {
  static_assert(V * sizeof(T) == 16);
  ptx::store_once(to, {words.at[0], words.at[1], words.at[2], words.at[3]});
}

// Stores V floats to a 16-byte aligned address.
template <int V>
__device__ void store_floats(float* to, const float (&values)[V]) {
#pragma unroll
  for (int j = 0; j < V; j += 4)
    ptx::store(to + j, {__float_as_uint(values[j]), __float_as_uint(values[j + 1]), __float_as_uint(values[j + 2]),
                        __float_as_uint(values[j + 3])});
}

template <bool constant, class W>
__device__ W load_word(const W* from) {
  if constexpr (constant)
    return __ldg(from);
  else
    return *from;
}

// Loads `bytes` (4, 8, or a multiple of 16) from an address aligned to min(bytes, 16). constant: the data is not
// written while the kernel runs; the load (ld.global.nc) may move past stores. ptxas moves it even before
// griddepcontrol.wait, so do not use it for data that the previous kernel may have written, unless its address comes
// from a normal load.
template <int bytes, bool constant = true>
__device__ void load_words(const void* from, uint32_t (&words)[bytes / 4]) {
  if constexpr (bytes == 4) {
    words[0] = load_word<constant>(static_cast<const uint32_t*>(from));
  } else if constexpr (bytes == 8) {
    const uint2 two = load_word<constant>(static_cast<const uint2*>(from));
    words[0] = two.x, words[1] = two.y;
  } else {
#pragma unroll
    for (int q = 0; q < bytes / 16; ++q) {
      const uint4 four = load_word<constant>(static_cast<const uint4*>(from) + q);
      words[4 * q] = four.x, words[4 * q + 1] = four.y, words[4 * q + 2] = four.z, words[4 * q + 3] = four.w;
    }
  }
}

// Loads from an unaligned address by the aligned words that contain the data. Reads only the needed bytes of the last
// word: memory may end there.
template <class T, int words>
__device__ void load_anywhere(const T* from, uint32_t (&at)[words]) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  const auto* const aligned = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const auto* const last = aligned + words;
  const unsigned bits = 8 * (address % 4);
  uint32_t low = *aligned;
#pragma unroll
  for (int w = 0; w < words; ++w) {
    uint32_t high = 0;
    if (w + 1 < words) {
      high = aligned[w + 1];
    } else if (sizeof(T) < 4) {
      if (bits >= 16) high = *reinterpret_cast<const unsigned short*>(last);
      if (sizeof(T) == 1 && bits % 16 != 0)
        high |= static_cast<uint32_t>(reinterpret_cast<const unsigned char*>(last)[bits / 16 * 2]) << (bits - 8);
    }
    at[w] = __funnelshift_r(low, high, bits);
    low = high;
  }
}

// Keeps the first n elements of a vector and zeroes the others.
template <class T, int V>
__device__ void keep_first(int n, Words<T, V>& words) {
#pragma unroll
  for (int w = 0; w < Words<T, V>::kCount; ++w)
    words.at[w] &= ~ptx::ones_from(8 * static_cast<int>(sizeof(T)) * n - 32 * w);
}

// Maximum; NaN only if both arguments are NaN.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

// e^x for softmax. Every x whose e^x is nonzero in the result is nonzero here.
constexpr float kLog2e = 1.44269504f;
__device__ inline float exp_of(float x) { return ptx::exp2_approx(x * kLog2e); }
__device__ inline double exp_of(double x) { return exp(x); }

// Maximum of an integer over the warp.
template <class I>
__device__ I largest_of_warp(I x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
#endif
}

// Sum over L adjacent lanes; all lanes get the same bits.
template <int L, class F>
__device__ F sum_of_group(F x) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// x / y, accurate to about the last bit, in four instructions.
template <class F>
__device__ F quotient(F x, F y) {
  if constexpr (sizeof(F) == 8) {
    return x / y;
  } else {
    const F part = ptx::reciprocal_approx(y), about = x * part;
    return fmaf(fmaf(-about, y, x), part, about);
  }
}

}  // namespace matmuls
