// Argmax over logits, plain and with Gumbel noise from a counter-based generator.
#include <cmath>
#include <limits>

#include "dispatch.h"
#include "parallel.h"

using namespace pagedgen;

namespace {

constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();
constexpr int CHUNK = 1024;

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) at the token's counter; the upper half is the noise.
INLINE uint32_t random_bits(uint64_t key, uint64_t token) {
  uint64_t z = key + (token + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return uint32_t((z ^ z >> 31) >> 32);
}

float gumbel(uint32_t bits) { return float(-std::log(-std::log1p(-(double(bits) + 0.5) * 0x1p-32))); }

struct Best {
  float value;
  int64_t index;  // the lowest with this value; -1 for a row with NaN or with nothing above -inf
};

template <class T>
Best row_max(const T* row, int width) {
  float best = NEGATIVE_INFINITY;
  int best_chunk = -1;
  vi nan{};
  for (int begin = 0; begin < width; begin += CHUNK) {
    const int end = std::min(width, begin + CHUNK);
    vf top = splat(NEGATIVE_INFINITY);
    int i = begin;
    for (; i + VL <= end; i += VL) {
      const vf v = load(row + i);
      nan |= v != v;
      top = max(v, top);
    }
    for (; i < end; ++i) {
      const float v = load_part(row + i, 1)[0];
      if (v != v) return {v, -1};
      top[0] = v > top[0] ? v : top[0];
    }
    const float chunk_best = max_lanes(top);
    if (chunk_best > best) {
      best = chunk_best;
      best_chunk = begin;
    }
  }
  if (any(nan) || best_chunk < 0) return {best, -1};
  int64_t index = best_chunk;
  while (load_part(row + index, 1)[0] != best) ++index;
  return {best, index};
}

// An upper bound of 2^(32 + slack) e^x, at most 7% too high: a float whose bits are an interpolated exponent lies on a
// chord of 2^x.
INLINE vf scaled_exp_bound(vf x, float slack) {
  vf exponent = x * 1.44269504f + (127.f + 32.f + slack);
  exponent = exponent > 0.f ? exponent : vf{};
  exponent = exponent < 254.f ? exponent : splat(254.f);
  return bit_cast<vf>(__builtin_convertvector(exponent * 0x1p23f, vi));
}

// Noise above g needs random bits below 2^32 e^-g, since 1 - exp(-e^-g) <= e^-g. So a token is looked at closely only
// if its bits lie below the bound that the best value so far sets for it; for most tokens no logarithm is taken.
template <class T>
int64_t gumbel_row(const T* row, int width, float temperature, uint64_t key) {
  const Best top = row_max(row, width);
  if (top.index < 0) return -1;
  Best best{top.value / temperature + gumbel(random_bits(key, uint64_t(top.index))), top.index};
  for (int begin = 0; begin < width; begin += VL) {
    const int n = std::min(VL, width - begin);
    const vf scaled = load_part(row + begin, n) / temperature;
    // The slack covers the rounding of this bound and of the sums that are compared.
    const vf bound = scaled_exp_bound(scaled - best.value, 1e-3f + 1e-6f * std::fabs(best.value));
    if (!any(bound > 0.25f)) continue;  // not even the largest noise would do
    uint32_t bits[VL];
    for (int i = 0; i < VL; ++i) bits[i] = random_bits(key, uint64_t(begin + i));
    vu random;
    std::memcpy(&random, bits, sizeof random);
    if (!any(__builtin_convertvector(random, vf) <= bound)) continue;
    for (int i = 0; i < n; ++i) {
      const float value = scaled[i] + gumbel(bits[i]);
      if (value > best.value || (value == best.value && begin + i < best.index)) best = {value, begin + i};
    }
  }
  return best.index;
}

}  // namespace

PAGEDGEN_EXPORT void pg_greedy_argmax(int type, const void* logits, int64_t stride, int64_t rows, int width,
                                      int64_t* out, int threads) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(rows, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) out[r] = row_max(static_cast<const T*>(logits) + r * stride, width).index;
    });
  });
}

PAGEDGEN_EXPORT void pg_gumbel_argmax(int type, const void* logits, int64_t stride, int64_t rows, int width,
                                      const float* temperature, const uint64_t* keys, int64_t* out, int threads) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(rows, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        out[r] = gumbel_row(static_cast<const T*>(logits) + r * stride, width, temperature[r], keys[r]);
    });
  });
}

PAGEDGEN_EXPORT void pg_gumbel_noise(const uint64_t* keys, const int64_t* tokens, float* out, int64_t rows,
                                     int64_t count, int threads) {
  parallel_for(rows, 8, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = r * count; i < (r + 1) * count; ++i) out[i] = gumbel(random_bits(keys[r], uint64_t(tokens[i])));
  });
}
