// RMSNorm and SiLU gate: one pass over memory each, arithmetic in float32, one rounding.
#include <cmath>

#include "dispatch.h"
#include "parallel.h"

using namespace pagedgen;

namespace {

// What a thread takes at a time: a few microseconds of work. That is little, but the threads are awake within a step, the
// data lies half in the other core's cache anyway, and a thread that waited through a longer region would fall asleep.
constexpr int64_t GRAIN_ELEMENTS = 16384;

int64_t grain_rows(int64_t row_elements) {
  return std::max<int64_t>(1, GRAIN_ELEMENTS / std::max<int64_t>(1, row_elements));
}

// Sum of squares of x, or of x + residual rounded to T, which is then also stored.
template <class T>
float add_and_square(const T* x, const T* residual, T* sum, int width) {
  vf squares{};
  for (int i = 0; i < width; i += VL) {
    const int n = std::min(VL, width - i);
    vf v = load_part(x + i, n);
    if (residual) {
      v += load_part(residual + i, n);
      T rounded[VL];
      store(rounded, v);
      v = load(rounded);
      store_part(sum + i, v, n);
    }
    squares += v * v;
  }
  return sum_lanes(squares);
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int width, float scale) {
  for (int i = 0; i < width; i += VL) {
    const int n = std::min(VL, width - i);
    store_part(out + i, load_part(weight + i, n) * (load_part(x + i, n) * scale), n);
  }
}

// A row in whole numbers from -127 to 127, and what they are to be multiplied by: the row's largest magnitude is 127.
template <class T>
float quantize_row(const T* x, int8_t* out, int width) {
  vf largest{};
  vf odd{};  // becomes NaN where x is NaN or infinite
  for (int i = 0; i < width; i += VL) {
    const vf v = load_part(x + i, std::min(VL, width - i));
    largest = max(largest, max(v, -v));
    odd += v * 0.f;
  }
  const float magnitude = max_lanes(largest), not_a_number = sum_lanes(odd);
  const float inverse = magnitude > 0 && not_a_number == 0 ? 127.f / magnitude : 0.f;
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, to even at ties
  for (int i = 0; i < width; i += VL) {
    const int n = std::min(VL, width - i);
    const vi whole = bit_cast<vi>(load_part(x + i, n) * inverse + magic) - bit_cast<vi>(magic);
    const vb bytes = __builtin_convertvector(whole, vb);
    if (n == VL)
      std::memcpy(out + i, &bytes, sizeof bytes);
    else
      for (int j = 0; j < n; ++j) out[i + j] = bytes[j];
  }
  return not_a_number == 0 ? magnitude / 127.f : not_a_number;
}

}  // namespace

PAGEDGEN_EXPORT void pg_quantize_rows(int type, const void* x, int64_t stride, int8_t* out, float* scales, int64_t rows,
                                      int width, int threads) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(rows, grain_rows(width), threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        scales[r] = quantize_row(static_cast<const T*>(x) + r * stride, out + r * width, width);
    });
  });
}

// residual and sum are null for the plain norm; x and residual may have a row stride.
PAGEDGEN_EXPORT void pg_rms_norm(int type, const void* x, int64_t x_stride, const void* residual,
                                 int64_t residual_stride, const void* weight, void* sum, void* out, int64_t rows,
                                 int width, float eps, int threads) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(rows, grain_rows(width), threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* source = static_cast<const T*>(x) + r * x_stride;
        const T* added = residual ? static_cast<const T*>(residual) + r * residual_stride : nullptr;
        T* total = residual ? static_cast<T*>(sum) + r * width : nullptr;
        const float squares = add_and_square(source, added, total, width);
        const float scale = 1.f / std::sqrt(squares / float(width) + eps);
        norm_row(residual ? total : source, static_cast<const T*>(weight), static_cast<T*>(out) + r * width, width,
                 scale);
      }
    });
  });
}

// The gate is silu, or gelu in its approximation by tanh: g * (1 + tanh(u)) / 2 = g / (1 + exp(-2u)).
PAGEDGEN_EXPORT void pg_gate_mul(int type, int is_gelu, const void* gate_up, int64_t stride, void* out, int64_t rows,
                                 int width, int threads) {
  constexpr float TWICE_ROOT_2_OVER_PI = 1.5957691216f, CUBIC = 0.044715f;
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(rows, grain_rows(width), threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(gate_up) + r * stride;
        T* target = static_cast<T*>(out) + r * width;
        for (int i = 0; i < width; i += VL) {
          const int n = std::min(VL, width - i);
          const vf g = load_part(gate + i, n);
          const vf power = is_gelu ? TWICE_ROOT_2_OVER_PI * g * (1.f + CUBIC * g * g) : g;
          store_part(target + i, g / (1.f + exp(-power)) * load_part(gate + width + i, n), n);
        }
      }
    });
  });
}
