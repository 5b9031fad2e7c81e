// Rotary embedding of queries and keys and the write of keys and values into the cache, in one pass over a token.
#include <cstring>

#include "dispatch.h"
#include "kernels.h"
#include "parallel.h"

using namespace pagedgen;

namespace {

constexpr int64_t GRAIN_ELEMENTS = 16384;

template <class T>
void rotate_row(const T* x, const float* cosine, const float* sine, T* out, int dim, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += VL) {
    const int n = std::min(VL, half - i);
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n);
    store_part(out + i, a * load_part(cosine + i, n) - b * load_part(sine + i, n), n);
    store_part(out + half + i, b * load_part(cosine + half + i, n) + a * load_part(sine + half + i, n), n);
  }
  if (rotary_dim < dim) std::memcpy(out + rotary_dim, x + rotary_dim, (dim - rotary_dim) * sizeof(T));
}

template <class T>
void rotate_and_write_token(const PgRotary& a, int64_t t) {
  const float *cosine = a.cosine + t * a.rotary_dim, *sine = a.sine + t * a.rotary_dim;
  const T* query = static_cast<const T*>(a.query) + t * a.query_token_stride;
  T* out = static_cast<T*>(a.out) + t * a.heads * a.dim;
  for (int h = 0; h < a.heads; ++h)
    rotate_row(query + h * a.query_head_stride, cosine, sine, out + h * a.dim, a.dim, a.rotary_dim);
  if (a.slots[t] < 0) return;
  const T* key = static_cast<const T*>(a.key) + t * a.key_token_stride;
  const T* value = static_cast<const T*>(a.value) + t * a.value_token_stride;
  const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
  for (int h = 0; h < a.kv_heads; ++h) {
    const int64_t row = int64_t(h) * a.block_size + offset;
    T* key_row = static_cast<T*>(a.key_cache) + block * a.key_block_stride + row * a.dim;
    T* value_row = static_cast<T*>(a.value_cache) + block * a.value_block_stride + row * a.value_dim;
    rotate_row(key + h * a.key_head_stride, cosine, sine, key_row, a.dim, a.rotary_dim);
    std::memcpy(value_row, value + h * a.value_head_stride, a.value_dim * sizeof(T));
  }
}

}  // namespace

PAGEDGEN_EXPORT void pg_rotary_write_kv(const PgRotary* args) {
  const PgRotary& a = *args;
  const int64_t token_elements = int64_t(a.heads + 2 * a.kv_heads) * a.dim;
  with_type(a.type, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(a.tokens, std::max<int64_t>(1, GRAIN_ELEMENTS / token_elements), a.threads,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t t = begin; t < end; ++t) rotate_and_write_token<T>(a, t);
                 });
  });
}
