// SIMD vectors of float in the widest registers of the target, through the GCC/Clang vector extensions.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"

#define INLINE inline __attribute__((always_inline))

namespace pagedgen {

#if defined(__AVX512F__)
constexpr int VL = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VL = 4;
constexpr int REGISTERS = 32;
#else
constexpr int VL = 4;
constexpr int REGISTERS = 16;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));

INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE vf splat(float x) { return vf{} + x; }
INLINE vi splat(int32_t x) { return vi{} + x; }

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

INLINE vf load(const bf16* p) {
#if defined(__AVX512F__)  // spelt out: tuned for some CPUs, the compiler would convert in two halves
  const __m256i wide = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(wide), 16);
#else
  vh half;
  std::memcpy(&half, p, sizeof half);
  return bit_cast<vf>(__builtin_convertvector(half, vu) << 16);
#endif
}

#if !(defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__)) || defined(__aarch64__))
INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The exponent is rebased by a multiplication, which also normalises subnormal halves.
  const float magnitude = bit_cast<float>(rest << 13) * 0x1p112f;
  return bit_cast<float>(sign | bit_cast<uint32_t>(magnitude));
}

INLINE uint16_t float_to_half(float f) {
  const uint32_t bits = bit_cast<uint32_t>(f), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (rest < 0x38800000u)  // subnormal: the addition aligns the mantissa and rounds it to nearest even
    return uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u));
  return uint16_t(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}
#endif

INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
#else
  vf v;
  for (int i = 0; i < VL; ++i) v[i] = half_to_float(p[i].bits);
  return v;
#endif
}

INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

INLINE void store(bf16* p, vf v) {  // round to nearest even; a NaN stays a (quiet) NaN
#if defined(__AVX512F__) && defined(__AVX512BF16__)  // numbers below the smallest normal one become zero
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
  const vu bits = bit_cast<vu>(v);
  const vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const vu quiet = v == v ? rounded : (bits >> 16 | 0x40u);
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)quiet));
#else
  const vh half = __builtin_convertvector(quiet, vh);
  std::memcpy(p, &half, sizeof half);
#endif
#endif
}

INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int i = 0; i < VL; ++i) p[i].bits = float_to_half(v[i]);
#endif
}

// Fewer than VL elements; kept out of line, for they are rare and the code is used everywhere.
template <class T>
__attribute__((noinline)) vf load_tail(const T* p, int n) {
  T buffer[VL] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

template <class T>
__attribute__((noinline)) void store_tail(T* p, vf v, int n) {
  T buffer[VL];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

// The first n elements (n > 0), at most VL, with zeros after them; nothing past them is touched.
template <class T>
INLINE vf load_part(const T* p, int n) {
  return n >= VL ? load(p) : load_tail(p, n);
}

template <class T>
INLINE void store_part(T* p, vf v, int n) {
  n >= VL ? store(p, v) : store_tail(p, v, n);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PAGEDGEN_SHUFFLEVECTOR 1
#endif
#endif

// Lane i of the result is lane pick(i) of a followed by b.
template <class Pick, size_t... I>
INLINE vf shuffle_impl(vf a, vf b, std::index_sequence<I...>) {
#ifdef PAGEDGEN_SHUFFLEVECTOR
  return __builtin_shufflevector(a, b, Pick::at(int(I))...);
#else
  return __builtin_shuffle(a, b, (vi){Pick::at(int(I))...});
#endif
}
template <class Pick>
INLINE vf shuffle(vf a, vf b) {
  return shuffle_impl<Pick>(a, b, std::make_index_sequence<VL>());
}

template <int K>
struct Swap {  // exchange lanes whose numbers differ in bit K
  static constexpr int at(int i) { return i ^ K; }
};
template <int K>
struct Keep {  // a where bit K of the lane is clear, b where it is set
  static constexpr int at(int i) { return i & K ? VL + i : i; }
};
template <int K>
struct KeepSwapped {
  static constexpr int at(int i) { return i & K ? VL + (i ^ K) : i ^ K; }
};
template <int K>
struct TransposeLow {
  static constexpr int at(int i) { return i & K ? VL + (i ^ K) : i; }
};
template <int K>
struct TransposeHigh {
  static constexpr int at(int i) { return i & K ? VL + i : i ^ K; }
};

INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }

template <int K = 1>
INLINE float sum_lanes(vf v) {
  if constexpr (K == VL) {
    return v[0];
  } else {
    return sum_lanes<2 * K>(v + shuffle<Swap<K>>(v, v));
  }
}

template <int K = 1>
INLINE float max_lanes(vf v) {
  if constexpr (K == VL) {
    return v[0];
  } else {
    return max_lanes<2 * K>(max(v, shuffle<Swap<K>>(v, v)));
  }
}

INLINE float min_lanes(vf v) { return -max_lanes(-v); }

INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  uint64_t words[VL / 2], all = 0;
  std::memcpy(words, &mask, sizeof words);
  for (uint64_t word : words) all |= word;
  return all != 0;
#endif
}

template <int K>
INLINE vf merge(vf a, vf b) {
  return shuffle<Keep<K>>(a, b) + shuffle<KeepSwapped<K>>(a, b);
}
template <int K = 4>
INLINE vf fold_quads(vf v) {
  if constexpr (K >= VL) {
    return v;
  } else {
    return fold_quads<2 * K>(v + shuffle<Swap<K>>(v, v));
  }
}
// out[0..3] = the lane sums of a, b, c and d.
INLINE void store_sums(float* out, vf a, vf b, vf c, vf d) {
  const vf sums = fold_quads(merge<2>(merge<1>(a, b), merge<1>(c, d)));
  std::memcpy(out, &sums, 4 * sizeof(float));
}

// In-register transposition of a VL x VL tile.
template <int K = 1>
INLINE void transpose(vf (&rows)[VL]) {
  if constexpr (K < VL) {
    for (int i = 0; i < VL; ++i) {
      if (i & K) continue;
      const vf a = rows[i], b = rows[i | K];
      rows[i] = shuffle<TransposeLow<K>>(a, b);
      rows[i | K] = shuffle<TransposeHigh<K>>(a, b);
    }
    transpose<2 * K>(rows);
  }
}

// e^x to 2 ulp (the polynomial is the one of Cephes' expf); 0 below -87.3, infinity above 88.4, NaN for NaN.
INLINE vf exp(vf x) {
  const vf lowest = splat(-87.33654f), highest = splat(88.8f);
  vf clamped = x < lowest ? lowest : x;
  clamped = clamped > highest ? highest : clamped;
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = (clamped * 1.44269504f + magic) - magic;
  const vf r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  const vf power = bit_cast<vf>((__builtin_convertvector(n, vi) + 127) << 23);
  return x < lowest ? vf{} : y * power;
}

INLINE vf tanh(vf x) {
  const vf square = x * x;
  vf series = splat(62.f / 2835.f);
  series = series * square - 17.f / 315.f;
  series = series * square + 2.f / 15.f;
  series = series * square - 1.f / 3.f;
  series = series * square * x + x;
  const vf ratio = 1.f - 2.f / (exp(2.f * x) + 1.f);
  return square < 0.04f ? series : ratio;  // the ratio cancels near zero
}

}  // namespace pagedgen
