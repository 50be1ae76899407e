// Vectors of ROWS_VECTOR_BYTES by GCC's extension. Included by the loops that row_functions.cpp and sparse/cpu.cpp
// compile once per instruction set, each time in another namespace. Hence no include guard and no #include: a header
// first included here would be compiled for this instruction set, and its inline functions, which the linker shares
// with the rest of the program by name, would then need that instruction set everywhere.

template <class A>
constexpr int kLanes = ROWS_VECTOR_BYTES / sizeof(A);
template <class A>
constexpr A kInfinity = __builtin_inf();

template <class Element, int lanes>
struct VectorOf {
  typedef Element type __attribute__((vector_size(lanes * sizeof(Element))));
};
template <class A>
using Vec = typename VectorOf<A, kLanes<A>>::type;
template <class Element>
using FloatLanes = typename VectorOf<Element, kLanes<float>>::type;  // as many lanes as Vec<float>

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, c10::Half>;
template <class T>
constexpr bool kIsBFloat16 = std::is_same_v<T, c10::BFloat16>;
template <class T>
using Bits = std::conditional_t<kIsHalf<T> || kIsBFloat16<T>, uint16_t, T>;

// --- Vectors ---------------------------------------------------------------------------------------------------------

template <class A>
C10_ALWAYS_INLINE Vec<A> splat(A value) {
  return value - Vec<A>{};
}

// Conversions that __builtin_convertvector lacks, or that GCC 12 splits into many instructions. (The maskz forms with
// all lanes set are used because GCC warns of an uninitialized variable in the plain ones.)
#if ROWS_VECTOR_BYTES == 64
C10_ALWAYS_INLINE Vec<float> from_half(FloatLanes<uint16_t> bits) {
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
}
C10_ALWAYS_INLINE FloatLanes<uint16_t> to_half(Vec<float> v) {
  return (FloatLanes<uint16_t>)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
}
C10_ALWAYS_INLINE Vec<int32_t> widen(FloatLanes<uint16_t> v) {
  return (Vec<int32_t>)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
}
C10_ALWAYS_INLINE Vec<int32_t> widen(FloatLanes<uint8_t> v) {
  return (Vec<int32_t>)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)v);
}
#elif ROWS_VECTOR_BYTES == 32
C10_ALWAYS_INLINE Vec<float> from_half(FloatLanes<uint16_t> bits) { return (Vec<float>)_mm256_cvtph_ps((__m128i)bits); }
C10_ALWAYS_INLINE FloatLanes<uint16_t> to_half(Vec<float> v) {
  return (FloatLanes<uint16_t>)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
C10_ALWAYS_INLINE Vec<int32_t> widen(FloatLanes<uint16_t> v) { return (Vec<int32_t>)_mm256_cvtepu16_epi32((__m128i)v); }
C10_ALWAYS_INLINE Vec<int32_t> widen(FloatLanes<uint8_t> v) {
  return (Vec<int32_t>)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v));
}
#else
// Per lane and not inlined: a dozen instructions a lane.
[[gnu::noinline]] Vec<float> from_half(FloatLanes<uint16_t> bits) {
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = c10::Half(bits[i], c10::Half::from_bits());
  return v;
}
[[gnu::noinline]] FloatLanes<uint16_t> to_half(Vec<float> v) {
  FloatLanes<uint16_t> bits;
  for (int i = 0; i < kLanes<float>; ++i) bits[i] = c10::Half(v[i]).x;
  return bits;
}
template <class Narrow>
C10_ALWAYS_INLINE Vec<int32_t> widen(Narrow v) {
  return __builtin_convertvector(v, Vec<int32_t>);
}
#endif

C10_ALWAYS_INLINE Vec<float> from_bfloat16(FloatLanes<uint16_t> bits) { return (Vec<float>)(widen(bits) << 16); }

// Rounds to nearest, ties to even: by the carry of adding 0x7fff, plus 1 if the kept part is odd.
C10_ALWAYS_INLINE FloatLanes<uint16_t> to_bfloat16(Vec<float> v) {
  const Vec<uint32_t> bits = (Vec<uint32_t>)v;
  const Vec<uint32_t> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(v == v ? rounded : Vec<uint32_t>{} + 0x7fc0, FloatLanes<uint16_t>);
}

// Loads the first `count` elements and no byte beyond them. Avoids memory (a wide load waits for narrow stores) and
// memcpy (a call spills every vector register).
template <class Element, int lanes, class V = typename VectorOf<Element, lanes>::type>
C10_ALWAYS_INLINE V load_part(const void* p, int count) {
  V v = {};
#if ROWS_VECTOR_BYTES == 64
  const __m512i part = _mm512_maskz_loadu_epi8((uint64_t{1} << count * sizeof(Element)) - 1, p);
  __builtin_memcpy(&v, &part, sizeof(V));
#else
#if ROWS_VECTOR_BYTES == 32
  if constexpr (sizeof(V) == 32 && sizeof(Element) == 4) {
    const Vec<int32_t> lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return (V)_mm256_maskload_epi32(static_cast<const int*>(p), (__m256i)(lane < count));
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < lanes - 1; ++i) {
    if (i >= count) break;
    Element element;
    __builtin_memcpy(&element, static_cast<const Element*>(p) + i, sizeof(Element));
    v[i] = element;
  }
#endif
  return v;
}

template <class Element, int lanes, class V = typename VectorOf<Element, lanes>::type>
C10_ALWAYS_INLINE void store_part(void* p, V v, int count) {
#if ROWS_VECTOR_BYTES == 64
  __m512i part = {};
  __builtin_memcpy(&part, &v, sizeof(V));
  _mm512_mask_storeu_epi8(p, (uint64_t{1} << count * sizeof(Element)) - 1, part);
#else
  // Not a masked store, which is microcode on AMD's processors.
  constexpr int half = lanes / 2;
  const auto put = [&](int i) C10_ALWAYS_INLINE_ATTRIBUTE {
    const Element element = v[i];
    __builtin_memcpy(static_cast<Element*>(p) + i, &element, sizeof(Element));
  };
  if (count >= half) {
    __builtin_memcpy(p, &v, sizeof(V) / 2);
#pragma GCC unroll 8
    for (int i = half; i < lanes - 1; ++i) {
      if (i >= count) break;
      put(i);
    }
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < half - 1; ++i) {
    if (i >= count) break;
    put(i);
  }
#endif
}

// Loads the first `count` elements at p; the other lanes are 0. With a constant, full count it is a plain load.
template <class A, class T>
C10_ALWAYS_INLINE Vec<A> load(const T* p, int count) {
  using Raw = typename VectorOf<Bits<T>, kLanes<A>>::type;
  Raw raw;
  if (count == kLanes<A>) {
    __builtin_memcpy(&raw, p, sizeof(raw));
  } else {
    raw = load_part<Bits<T>, kLanes<A>>(p, count);
  }
  if constexpr (kIsHalf<T>) {
    return from_half(raw);
  } else if constexpr (kIsBFloat16<T>) {
    return from_bfloat16(raw);
  } else if constexpr (std::is_same_v<T, uint8_t> && std::is_same_v<A, float>) {
    return __builtin_convertvector(widen(raw), Vec<float>);
  } else {
    return __builtin_convertvector(raw, Vec<A>);
  }
}

template <class A, class T>
C10_ALWAYS_INLINE void store(T* p, Vec<A> v, int count) {
  typename VectorOf<Bits<T>, kLanes<A>>::type raw;
  if constexpr (kIsHalf<T>) {
    raw = to_half(v);
  } else if constexpr (kIsBFloat16<T>) {
    raw = to_bfloat16(v);
  } else {
    raw = v;
  }
  if (count == kLanes<A>) {
    __builtin_memcpy(static_cast<void*>(p), &raw, sizeof(raw));
  } else {
    store_part<Bits<T>, kLanes<A>>(p, raw, count);
  }
}

// v with lanes from `count` on set to `value`.
template <class A>
C10_ALWAYS_INLINE Vec<A> pad(Vec<A> v, int count, A value) {
  if (count == kLanes<A>) return v;
  Vec<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
  return lane < splat<A>(count) ? v : splat(value);
}

template <class A>
C10_ALWAYS_INLINE Vec<A> greater(Vec<A> a, Vec<A> b) {
  return a > b ? a : b;  // b if a is NaN
}

// Reduces a vector to one element with `combine`, halving it each time.
template <class A, int lanes, class F>
C10_ALWAYS_INLINE A fold(typename VectorOf<A, lanes>::type v, F combine) {
  if constexpr (lanes == 1) {
    return v[0];
  } else {
    typename VectorOf<A, lanes / 2>::type halves[2];
    __builtin_memcpy(halves, &v, sizeof(v));
    return fold<A, lanes / 2>(combine(halves[0], halves[1]), combine);
  }
}

template <class A>
C10_ALWAYS_INLINE A sum_of_lanes(Vec<A> v) {
  return fold<A, kLanes<A>>(v, [](auto a, auto b) C10_ALWAYS_INLINE_ATTRIBUTE { return a + b; });
}

template <class A>
C10_ALWAYS_INLINE A max_of_lanes(Vec<A> v) {
  return fold<A, kLanes<A>>(v, [](auto a, auto b) C10_ALWAYS_INLINE_ATTRIBUTE { return a > b ? a : b; });
}

C10_ALWAYS_INLINE Vec<double> square_root(Vec<double> v) {
#if ROWS_VECTOR_BYTES == 64
  return (Vec<double>)_mm512_maskz_sqrt_pd(0xff, (__m512d)v);
#elif ROWS_VECTOR_BYTES == 32
  return (Vec<double>)_mm256_sqrt_pd((__m256d)v);
#else
  for (int i = 0; i < kLanes<double>; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}
