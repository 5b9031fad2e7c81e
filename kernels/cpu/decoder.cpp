// All layers of a decoder of the Llama family in one call: the kernels one after the other, in bfloat16 with products in
// tiles. What the calls of each by itself compute, without the time that each call takes.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels.h"
#include "types.h"

using namespace pagedgen;

extern "C" {

struct PgProduct {
  const void* panels;  // of pg_pack_panels
  const float* bias;   // or null
  const float* scale;  // of the columns, for int8
  int32_t columns, inner, bits, gated;
};

struct PgDecoderLayer {
  const void *input_norm, *post_norm;
  PgProduct qkv, output, gate_up, down;
  void *key_cache, *value_cache;
  int32_t window, rotary;  // rotary: whether queries and keys are rotated
};

// The fields of _DecoderArgs in decoder.py.
struct PgDecoder {
  const PgDecoderLayer* layers;
  const void* final_norm;
  int64_t key_block_stride, value_block_stride;
  int32_t count, hidden, heads, kv_heads, dim, block_size;
  float eps, scale;
  int64_t tokens;
  void* residual;              // [tokens, hidden], the embedded tokens; overwritten
  const float *cosine, *sine;  // [tokens, rotary_dim]
  const int64_t* slots;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* context_lens;
  const int32_t* query_start;
  const int64_t* rows;  // [row_count], which tokens are wanted
  int64_t row_count;
  void* out;        // [row_count, hidden], normed
  void* workspace;  // of pg_decoder_workspace bytes
  double* seconds;  // of each Part, added to; or null
  int32_t sequences, rotary_dim, threads;
};
}

namespace {

constexpr int BF16 = 1;  // the number of the type
enum Part { NORM, QKV, ROTARY, ATTENTION, OUTPUT, GATE_UP, DOWN };

class Pass {
 public:
  explicit Pass(const PgDecoder& args) : d(args), width(int64_t(args.heads) * args.dim) {}

  // The places of what is between the kernels; how many bytes they take.
  int64_t place(char* workspace) {
    int64_t taken = 0;
    const auto take = [&](int64_t bytes) {
      char* at = workspace ? workspace + taken : nullptr;
      taken += (bytes + 63) / 64 * 64;
      return at;
    };
    int64_t widest = std::max<int64_t>(d.hidden, width), inner = 0;
    for (int i = 0; i < d.count; ++i) inner = std::max<int64_t>(inner, d.layers[i].down.inner);
    widest = std::max(widest, inner);
    const int64_t rows = std::max(d.tokens, d.row_count), bytes = rows * int64_t(sizeof(bf16));
    normed = take(bytes * d.hidden);
    qkv = take(bytes * qkv_width());
    query = take(bytes * width);
    attended = take(bytes * width);
    product = take(bytes * d.hidden);
    gated = take(bytes * inner);
    rounded = reinterpret_cast<int8_t*>(take(rows * widest));
    row_scales = reinterpret_cast<float*>(take(rows * int64_t(sizeof(float))));
    return taken;
  }

  void run() {
    residual = static_cast<char*>(d.residual);
    const int64_t all = d.tokens;
    timed(NORM, [&] {
      pg_rms_norm(BF16, residual, d.hidden, nullptr, 0, d.layers[0].input_norm, nullptr, normed, all, d.hidden, d.eps,
                  d.threads);
    });
    for (int i = 0; i < d.count; ++i) {
      const PgDecoderLayer& layer = d.layers[i];
      const bool last = i + 1 == d.count;
      timed(QKV, [&] { multiply(layer.qkv, normed, qkv, all); });
      timed(ROTARY, [&] { write_kv(layer); });
      timed(ATTENTION, [&] { attend(layer); });
      // Past the last attention no token reads another, so only the rows that are asked for go on.
      if (last) select_rows();
      const int64_t rows = last ? d.row_count : all;
      if (!rows) return;
      timed(OUTPUT, [&] { multiply(layer.output, attended, product, rows); });
      timed(NORM, [&] { add_and_norm(layer.post_norm, normed, rows); });
      timed(GATE_UP, [&] { multiply(layer.gate_up, normed, gated, rows); });
      timed(DOWN, [&] { multiply(layer.down, gated, product, rows); });
      timed(NORM, [&] {
        add_and_norm(last ? d.final_norm : d.layers[i + 1].input_norm, last ? static_cast<char*>(d.out) : normed, rows);
      });
    }
  }

 private:
  template <class F>
  void timed(Part part, const F& call) {
    if (!d.seconds) return call();
    const auto started = std::chrono::steady_clock::now();
    call();
    d.seconds[part] += std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  }

  void multiply(const PgProduct& p, const char* x, char* out, int64_t rows) {
    PgGemm g{};
    g.x = x;
    g.panels = p.panels;
    g.bias = p.bias;
    g.columns_scale = p.scale;
    g.out = out;
    g.x_stride = p.inner;
    g.out_stride = p.gated ? p.columns / 2 : p.columns;
    g.rows = rows;
    g.columns = p.columns;
    g.inner = p.inner;
    g.bits = p.bits;
    g.gated = p.gated;
    g.threads = d.threads;
    if (p.bits == 8) {
      pg_quantize_rows(BF16, x, p.inner, rounded, row_scales, rows, p.inner, d.threads);
      g.x = rounded;
      g.rows_scale = row_scales;
    }
    pg_gemm(&g);
  }

  int64_t qkv_width() const { return width + 2 * int64_t(d.kv_heads) * d.dim; }
  char* keys() const { return qkv + width * sizeof(bf16); }
  char* values() const { return keys() + int64_t(d.kv_heads) * d.dim * sizeof(bf16); }

  void write_kv(const PgDecoderLayer& layer) {
    const int64_t stride = qkv_width();
    if (layer.rotary) {
      PgRotary rotary{};
      rotary.query = qkv;
      rotary.key = keys();
      rotary.value = values();
      rotary.query_token_stride = rotary.key_token_stride = rotary.value_token_stride = stride;
      rotary.query_head_stride = rotary.key_head_stride = rotary.value_head_stride = d.dim;
      rotary.cosine = d.cosine;
      rotary.sine = d.sine;
      rotary.out = query;
      rotary.key_cache = layer.key_cache;
      rotary.value_cache = layer.value_cache;
      rotary.key_block_stride = d.key_block_stride;
      rotary.value_block_stride = d.value_block_stride;
      rotary.slots = d.slots;
      rotary.tokens = d.tokens;
      rotary.type = BF16;
      rotary.heads = d.heads;
      rotary.kv_heads = d.kv_heads;
      rotary.block_size = d.block_size;
      rotary.dim = rotary.value_dim = d.dim;
      rotary.rotary_dim = d.rotary_dim;
      rotary.threads = d.threads;
      return pg_rotary_write_kv(&rotary);
    }
    const int64_t bytes = sizeof(bf16);
    pg_write_kv(keys(), stride * bytes, d.dim * bytes, values(), stride * bytes, d.dim * bytes,
                static_cast<char*>(layer.key_cache), static_cast<char*>(layer.value_cache), d.key_block_stride * bytes,
                d.value_block_stride * bytes, d.slots, d.tokens, d.kv_heads, d.block_size, d.dim * bytes, d.dim * bytes,
                d.threads);
  }

  void attend(const PgDecoderLayer& layer) {
    PgAttention a{};
    a.query = layer.rotary ? query : qkv;
    a.query_token_stride = layer.rotary ? width : qkv_width();
    a.query_head_stride = d.dim;
    a.key_cache = layer.key_cache;
    a.value_cache = layer.value_cache;
    a.key_block_stride = d.key_block_stride;
    a.value_block_stride = d.value_block_stride;
    a.block_tables = d.block_tables;
    a.table_stride = d.table_stride;
    a.context_lens = d.context_lens;
    a.query_start = d.query_start;
    a.out = attended;
    a.type = BF16;
    a.sequences = d.sequences;
    a.heads = d.heads;
    a.kv_heads = d.kv_heads;
    a.block_size = d.block_size;
    a.key_dim = a.value_dim = d.dim;
    a.window = layer.window;
    a.scale = d.scale;
    a.threads = d.threads;
    pg_paged_attention(&a);
  }

  // Moves the wanted rows into buffers that nothing else needs any more.
  void select_rows() {
    const int64_t heads_bytes = width * sizeof(bf16), hidden_bytes = d.hidden * int64_t(sizeof(bf16));
    for (int64_t i = 0; i < d.row_count; ++i) {
      std::memcpy(query + i * heads_bytes, attended + d.rows[i] * heads_bytes, heads_bytes);
      std::memcpy(product + i * hidden_bytes, residual + d.rows[i] * hidden_bytes, hidden_bytes);
    }
    std::swap(query, attended);
    std::swap(product, residual);
  }

  void add_and_norm(const void* weight, char* out, int64_t rows) {
    pg_rms_norm(BF16, product, d.hidden, residual, d.hidden, weight, residual, out, rows, d.hidden, d.eps, d.threads);
  }

  const PgDecoder& d;
  const int64_t width;  // of all query heads
  char *residual = nullptr, *normed, *qkv, *query, *attended, *product, *gated;
  int8_t* rounded;
  float* row_scales;
};

}  // namespace

PAGEDGEN_EXPORT int64_t pg_decoder_workspace(const PgDecoder* args) { return Pass(*args).place(nullptr); }

PAGEDGEN_EXPORT void pg_decoder(const PgDecoder* args) {
  Pass pass(*args);
  pass.place(static_cast<char*>(args->workspace));
  pass.run();
}
