// RMSNorm, SiLU gate and rotary embedding: one pass over memory each, arithmetic in float32, one rounding.
#include <cmath>

#include "dispatch.h"
#include "parallel.h"

using namespace pagedgen;

namespace {

// What a thread takes at a time: tens of microseconds of work, well above the cost of waking a thread for it.
constexpr int64_t GRAIN_ELEMENTS = 131072;

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
      std::memcpy(sum + i, rounded, n * sizeof(T));
      v = load(rounded);
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

template <class T>
void rotate_row(const T* x, const float* cosine, const float* sine, T* out, int dim, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += VL) {
    const int n = std::min(VL, half - i);
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n);
    store_part(out + i, a * load_part(cosine + i, n) - b * load_part(sine + i, n), n);
    store_part(out + half + i, b * load_part(cosine + half + i, n) + a * load_part(sine + half + i, n), n);
  }
  std::memcpy(out + rotary_dim, x + rotary_dim, (dim - rotary_dim) * sizeof(T));
}

}  // namespace

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

PAGEDGEN_EXPORT void pg_silu_mul(int type, const void* gate_up, int64_t stride, void* out, int64_t rows, int width,
                                 int threads) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(rows, grain_rows(width), threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(gate_up) + r * stride;
        T* target = static_cast<T*>(out) + r * width;
        for (int i = 0; i < width; i += VL) {
          const int n = std::min(VL, width - i);
          const vf g = load_part(gate + i, n);
          store_part(target + i, g / (1.f + exp(-g)) * load_part(gate + width + i, n), n);
        }
      }
    });
  });
}

PAGEDGEN_EXPORT void pg_apply_rotary(int type, const void* x, int64_t token_stride, int64_t head_stride,
                                     const float* cosine, const float* sine, void* out, int64_t tokens, int heads,
                                     int dim, int rotary_dim, int threads) {
  with_type(type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(tokens, grain_rows(int64_t(heads) * dim), threads, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int h = 0; h < heads; ++h)
          rotate_row(static_cast<const T*>(x) + t * token_stride + h * head_stride, cosine + t * rotary_dim,
                     sine + t * rotary_dim, static_cast<T*>(out) + (t * heads + h) * dim, dim, rotary_dim);
    });
  });
}
