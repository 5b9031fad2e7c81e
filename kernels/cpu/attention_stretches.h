// What attention with AMX works on: the shapes of its tile registers, where the keys and values of a tile lie, and their way
// into the cache.
#pragma once
#include "attention.h"
#include "tiles.h"

#if defined(PAGEDGEN_TILES)

namespace pagedgen {

// How many rows of queries go through the tiles at a time: the fewer, the less time they take. Few rows are a decoding
// sequence's, many a prompt's.
constexpr int FEW_LANES = 4, MANY_LANES = 16;

// The tile registers, by number, for the intrinsics take nothing else: 0 and 1 scores of keys by rows, 2 queries, 3 keys,
// 4 and 5 sums of rows by columns, 6 weights, 7 values; 3 and 7 serve for both.
class AttentionTiles {
 public:
  ~AttentionTiles() {
    if (lanes) _tile_release();
  }

  void use(int wanted) {
    if (lanes == wanted) return;
    lanes = wanted;
    TileLayout layout;
    for (int tile : {0, 1, 2}) layout.row_bytes[tile] = uint16_t(lanes * 4);
    for (int tile : {4, 5, 6}) layout.rows[tile] = uint8_t(lanes);
    layout.use();
  }

 private:
  int lanes = 0;
};

// The keys and values of a tile by stretches of 16 keys, each of which lies in one block.
struct Place {
  int begin = 0, count = 0;
  const bf16* keys[TILE / TILE_ROWS];
  const bf16* values[TILE / TILE_ROWS];

  int stretches() const { return (count + TILE_ROWS - 1) / TILE_ROWS; }

  void locate(const PgAttention& a, const Task& task, int first_key) {
    begin = first_key;
    count = std::min(TILE, task.key_end - first_key);
    const int32_t* table = a.block_tables + task.sequence * a.table_stride;
    for (int i = 0; i < stretches(); ++i) {
      const int key = first_key + i * TILE_ROWS;
      const int64_t block = table[key / a.block_size], row = int64_t(task.kv_head) * a.block_size + key % a.block_size;
      keys[i] = static_cast<const bf16*>(a.key_cache) + block * a.key_block_stride + row * a.key_dim;
      values[i] = static_cast<const bf16*>(a.value_cache) + block * a.value_block_stride + row * a.value_dim;
    }
  }
};

// Fetches a tile into the L2 cache, line by line in the order of addresses, while the one before it is computed. A core
// keeps memory busy only if what it asks for is spread evenly over what it computes.
class Ahead {
 public:
  explicit Ahead(const PgAttention& args) : a(args) {}

  void begin(const Place& next, int kv_heads) {
    place = &next, heads = kv_heads, span = -1, at = end = nullptr;
    if (place->count > 0) advance();
  }

  template <int LINES>
  INLINE void fetch() {
    if (at == end) return;
#pragma GCC unroll 8
    for (int i = 0; i < LINES; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
    at += LINES * 64;
    if (at == end) advance();
  }

 private:
  // A span is what a stretch has for one head, a multiple of 1024 bytes.
  void advance() {
    if (++span >= 2 * heads * place->stretches()) return;
    const int stretch = span / (2 * heads), head = span % heads;
    const bool values = span / heads % 2;
    const int64_t dim = values ? a.value_dim : a.key_dim;
    at = reinterpret_cast<const char*>((values ? place->values : place->keys)[stretch] + head * a.block_size * dim);
    end = at + TILE_ROWS * dim * int64_t(sizeof(bf16));
  }

  const PgAttention& a;
  const Place* place;
  const char *at, *end;
  int heads, span;
};

}  // namespace pagedgen
#endif
