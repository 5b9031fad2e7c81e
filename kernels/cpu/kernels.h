// The kernels that others call, by the names they are exported under, and their arguments. The fields of the structures are
// those of the classes in library.py.
#pragma once
#include <cstdint>

extern "C" {

struct PgAttention {
  const void* query;
  int64_t query_token_stride, query_head_stride;
  const void* key_cache;    // [blocks, kv_heads, block_size, key_dim], blocks `key_block_stride` elements apart
  const void* value_cache;  // [blocks, kv_heads, block_size, value_dim]
  int64_t key_block_stride, value_block_stride;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* context_lens;
  const int32_t* query_start;
  const float* sinks;  // [heads] or null
  void* out;           // [tokens, heads, value_dim]
  int32_t type, sequences, heads, kv_heads, block_size, key_dim, value_dim;
  int32_t window;        // 0: none
  float scale, softcap;  // softcap 0: none
  int32_t threads;
};

struct PgGemm {
  const void* x;               // [rows, inner], rows `x_stride` elements apart
  const void* panels;          // of pg_pack_panels
  const float* bias;           // [columns] or null
  const float* columns_scale;  // [columns], for int8
  const float* rows_scale;     // [rows], for int8
  void* out;                   // bfloat16 [rows, columns, or half of them if gated], rows `out_stride` elements apart
  int64_t x_stride, out_stride, rows;
  int32_t columns, inner, bits, gated, threads;
};

// query [tokens, heads, dim], key [tokens, kv_heads, dim] and value [tokens, kv_heads, value_dim] with token and head strides
// in elements; cosine and sine [tokens, rotary_dim]; out like query, dense; the caches [blocks, kv_heads, block_size, dim or
// value_dim], of whose blocks the strides are given.
struct PgRotary {
  const void *query, *key, *value;
  int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
      value_head_stride;
  const float *cosine, *sine;
  void *out, *key_cache, *value_cache;
  int64_t key_block_stride, value_block_stride;
  const int64_t* slots;
  int64_t tokens;
  int32_t type, heads, kv_heads, block_size, dim, value_dim, rotary_dim, threads;
};

void pg_gemm(const PgGemm*);
void pg_rotary_write_kv(const PgRotary*);
void pg_paged_attention(const PgAttention*);
void pg_write_kv(const char* key, int64_t key_token_stride, int64_t key_head_stride, const char* value,
                 int64_t value_token_stride, int64_t value_head_stride, char* key_cache, char* value_cache,
                 int64_t key_block_bytes, int64_t value_block_bytes, const int64_t* slots, int64_t tokens, int heads,
                 int block_size, int64_t key_bytes, int64_t value_bytes, int threads);
void pg_rms_norm(int type, const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                 const void* weight, void* sum, void* out, int64_t rows, int width, float eps, int threads);
void pg_quantize_rows(int type, const void* x, int64_t stride, int8_t* out, float* scales, int64_t rows, int width,
                      int threads);
}
