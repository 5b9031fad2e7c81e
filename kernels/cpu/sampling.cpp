// Over rows of logits: the argmax, plain and with Gumbel noise from a counter-based generator, and the largest ones.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

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
// Tokens whose scaled logit lies below `lowest` are passed over; the largest one never does.
template <class T>
int64_t gumbel_row(const T* row, int width, float temperature, uint64_t key, float lowest) {
  const Best top = row_max(row, width);
  if (top.index < 0) return -1;
  Best best{top.value / temperature + gumbel(random_bits(key, uint64_t(top.index))), top.index};
  for (int begin = 0; begin < width; begin += VL) {
    const int n = std::min(VL, width - begin);
    const vf scaled = load_part(row + begin, n) / temperature;
    // The slack covers the rounding of this bound and of the sums that are compared.
    const vf reach = scaled_exp_bound(scaled - best.value, 1e-3f + 1e-6f * std::fabs(best.value));
    const vf bound = scaled < lowest ? vf{} : reach;
    if (!any(bound > 0.25f)) continue;  // not even the largest noise would do
    uint32_t bits[VL];
    for (int i = 0; i < VL; ++i) bits[i] = random_bits(key, uint64_t(begin + i));
    vu random;
    std::memcpy(&random, bits, sizeof random);
    if (!any(__builtin_convertvector(random, vf) <= bound)) continue;
    for (int i = 0; i < n; ++i) {
      if (scaled[i] < lowest) continue;
      const float value = scaled[i] + gumbel(bits[i]);
      if (value > best.value || (value == best.value && begin + i < best.index)) best = {value, begin + i};
    }
  }
  return best.index;
}

// A row's largest logits while it is scanned in order: candidates are appended, and pruned to the k best now and then.
class Largest {
 public:
  explicit Largest(int k) : k_(k), ranks_(new uint64_t[2 * size_t(k) + CHUNK]) {}

  // At most CHUNK calls of `add` between two of `prune`; logits up to the threshold cannot be among the k.
  float threshold() const { return threshold_; }
  INLINE void add(float logit, int token) {
    const int32_t bits = bit_cast<int32_t>(logit + 0.f);  // the sum makes -0 a 0
    ranks_[count_++] = uint64_t(ordered(bits) ^ INT32_MIN) << 32 | uint32_t(~token);
  }
  void prune() {
    if (count_ < 2 * size_t(k_)) return;
    shrink();
    threshold_ = logit(ranks_[k_ - 1]);
  }

  // The k best, the best first, then -inf with the token 0.
  void write(float* logits, int64_t* tokens) {
    if (count_ > size_t(k_)) shrink();
    std::sort(ranks_.get(), ranks_.get() + count_, std::greater<>());
    for (size_t i = 0; i < size_t(k_); ++i) {
      logits[i] = i < count_ ? logit(ranks_[i]) : NEGATIVE_INFINITY;
      tokens[i] = i < count_ ? uint32_t(~ranks_[i]) : 0;
    }
  }

 private:
  // A float's bits as an integer that orders as the floats do, and back. A rank has it above the token's complement, so
  // that of equal logits the lowest token is the largest.
  static INLINE int32_t ordered(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
  static INLINE float logit(uint64_t rank) { return bit_cast<float>(ordered(int32_t(rank >> 32) ^ INT32_MIN)); }
  void shrink() {
    std::nth_element(ranks_.get(), ranks_.get() + k_ - 1, ranks_.get() + count_, std::greater<>());
    count_ = k_;
  }

  int k_;
  size_t count_ = 0;
  float threshold_ = NEGATIVE_INFINITY;
  std::unique_ptr<uint64_t[]> ranks_;
};

// load_part with -inf in the lanes past the end.
template <class T>
__attribute__((noinline)) vf load_row_end(const T* p, int n) {
  vf v = load_tail(p, n);
  for (int lane = n; lane < VL; ++lane) v[lane] = NEGATIVE_INFINITY;
  return v;
}
template <class T>
INLINE vf load_row_part(const T* p, int n) {
  return n >= VL ? load(p) : load_row_end(p, n);
}

// log(sum(exp(row / temperature))), NaN for a row that holds one. A chunk is read for its largest value, which bounds
// the exponents, and for the row's largest, and once more, from the cache, for its sum.
template <class T>
float logsumexp_row(const T* row, int width, float temperature, Largest& largest) {
  const float scale = 1.f / temperature;
  float highest = NEGATIVE_INFINITY;
  double sum = 0;
  vi nan{};
  for (int begin = 0; begin < width; begin += CHUNK) {
    const int end = std::min(width, begin + CHUNK);
    const vf threshold = splat(largest.threshold());
    vf top = splat(NEGATIVE_INFINITY);
    for (int i = begin; i < end; i += VL) {
      const vf v = load_row_part(row + i, end - i);
      nan |= v != v;
      top = max(v, top);
      if (!any(v > threshold)) continue;
      for (int lane = 0; lane < VL; ++lane)
        if (v[lane] > largest.threshold()) largest.add(v[lane], i + lane);
    }
    largest.prune();
    const float chunk_highest = max_lanes(top);
    if (chunk_highest > highest) {
      sum *= std::exp(double(highest - chunk_highest) * scale);
      highest = chunk_highest;
    }
    if (std::isinf(highest)) continue;
    vf exponentials{};
    for (int i = begin; i < end; i += VL) exponentials += exp((load_row_part(row + i, end - i) - highest) * scale);
    sum += sum_lanes(exponentials);
  }
  if (any(nan)) return std::numeric_limits<float>::quiet_NaN();
  return std::isinf(highest) ? highest : float(highest / temperature + std::log(sum));
}

// The scaled logits of a row and their masses relative to the largest one, padded to whole vectors with -inf and 0.
struct Scaled {
  int size;
  float highest, lowest;  // of the values above -inf
  std::unique_ptr<float[]> values, masses;

  template <class T>
  Scaled(const T* row, int width, float temperature)
      : size(round_up(width, VL)), values(new float[size]), masses(new float[size]) {
    vf high = splat(NEGATIVE_INFINITY), low = splat(-NEGATIVE_INFINITY);
    for (int i = 0; i < size; i += VL) {
      const vf v = load_row_part(row + i, width - i) / temperature;
      high = max(v, high);
      low = v > NEGATIVE_INFINITY ? min(v, low) : low;
      store(&values[i], v);
    }
    highest = max_lanes(high);
    lowest = min_lanes(low);
    for (int i = 0; i < size; i += VL) store(&masses[i], exp(load(&values[i]) - highest));
  }

  // The weight of the values above `bound`: their summed mass, or their number.
  template <bool COUNT>
  double weight_above(float bound) const {
    float below, above;
    return split<COUNT>(bound, below, above);
  }

  // The smallest of the values with a weight below `limit` above it. Bisected: each end is always one of the values.
  template <bool COUNT>
  float lowest_within(double limit) const {
    float low = lowest, high = highest;
    while (low < high) {
      const float middle = 0.5f * low + 0.5f * high;
      float below, above;
      if (split<COUNT>(middle < high ? middle : low, below, above) < limit)
        high = below;
      else
        low = above;
    }
    return high;
  }

 private:
  // weight_above, and the values next to the bound: the largest up to it, the smallest above it.
  template <bool COUNT>
  double split(float bound, float& below, float& above) const {
    double weight = 0;
    vf low = splat(NEGATIVE_INFINITY), high = splat(-NEGATIVE_INFINITY);
    for (int begin = 0; begin < size; begin += CHUNK) {
      vf sum{};
      for (int i = begin, end = std::min(size, begin + CHUNK); i < end; i += VL) {
        const vf v = load(&values[i]), one = COUNT ? splat(1.f) : load(&masses[i]);
        sum += v > bound ? one : vf{};
        low = v > bound ? low : max(v, low);
        high = v > bound ? min(v, high) : high;
      }
      weight += sum_lanes(sum);
    }
    below = max_lanes(low);
    above = min_lanes(high);
    return weight;
  }
};

template <class T>
float lowest_kept_row(const T* row, int width, float temperature, int64_t top_k, float top_p, float min_p) {
  const Scaled scaled(row, width, temperature);
  if (std::isinf(scaled.highest)) return scaled.highest;  // bisecting up to it would pass every other value
  float lowest = scaled.highest + std::log(min_p);
  double left = scaled.weight_above<false>(NEGATIVE_INFINITY);
  if (top_k > 0 && top_k < width) {
    const float kth = scaled.lowest_within<true>(double(top_k));
    left = scaled.weight_above<false>(std::nextafter(kth, NEGATIVE_INFINITY));
    lowest = std::max(lowest, kth);
  }
  return top_p < 1 ? std::max(lowest, scaled.lowest_within<false>(top_p * left)) : lowest;
}

// Calls f(i, row) for i in [0, count), shared out over the threads: the row index[i], or i without an index.
template <class F>
void for_rows(int type, const void* logits, int64_t stride, const int64_t* index, int64_t count, int threads,
              const F& f) {
  with_type(type, [&](auto tag) {
    const auto* rows = static_cast<const decltype(tag)*>(logits);
    parallel_for(count, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i, rows + (index ? index[i] : i) * stride);
    });
  });
}

}  // namespace

PAGEDGEN_EXPORT void pg_greedy_argmax(int type, const void* logits, int64_t stride, int width, const int64_t* index,
                                      int64_t count, int64_t* out, int threads) {
  for_rows(type, logits, stride, index, count, threads,
           [&](int64_t i, const auto* row) { out[i] = row_max(row, width).index; });
}

PAGEDGEN_EXPORT void pg_gumbel_argmax(int type, const void* logits, int64_t stride, int width, const int64_t* index,
                                      int64_t count, const float* temperature, const uint64_t* keys,
                                      const float* lowest, int64_t* out, int threads) {
  for_rows(type, logits, stride, index, count, threads, [&](int64_t i, const auto* row) {
    out[i] = gumbel_row(row, width, temperature[i], keys[i], lowest ? lowest[i] : NEGATIVE_INFINITY);
  });
}

PAGEDGEN_EXPORT void pg_lowest_kept(int type, const void* logits, int64_t stride, int width, const int64_t* index,
                                    int64_t count, const float* temperature, const int64_t* top_k, const float* top_p,
                                    const float* min_p, float* out, int threads) {
  for_rows(type, logits, stride, index, count, threads, [&](int64_t i, const auto* row) {
    out[i] = lowest_kept_row(row, width, temperature[i], top_k[i], top_p[i], min_p[i]);
  });
}

PAGEDGEN_EXPORT void pg_top_tokens(int type, const void* logits, int64_t stride, int width, const int64_t* index,
                                   int64_t count, const float* temperature, int k, float* values, int64_t* ids,
                                   float* total, int threads) {
  for_rows(type, logits, stride, index, count, threads, [&](int64_t i, const auto* row) {
    Largest largest(k);
    total[i] = logsumexp_row(row, width, temperature[i], largest);
    largest.write(values + i * k, ids + i * k);
  });
}

PAGEDGEN_EXPORT void pg_gumbel_noise(const uint64_t* keys, const int64_t* tokens, float* out, int64_t rows,
                                     int64_t count, int threads) {
  parallel_for(rows, 8, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = r * count; i < (r + 1) * count; ++i) out[i] = gumbel(random_bits(keys[r], uint64_t(tokens[i])));
  });
}
