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
constexpr int LEAD = TILE / TILE_ROWS;  // stretches of keys and values that are fetched ahead

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

// 16 keys from a multiple of 16 on, and their values, for a task's first key/value head: they lie in one block.
struct Stretch {
  const bf16 *keys, *values;
};

inline Stretch locate(const PgAttention& a, const Task& task, int key) {
  const int64_t block = a.block_tables[task.sequence * a.table_stride + key / a.block_size];
  const int64_t row = int64_t(task.kv_head) * a.block_size + key % a.block_size;
  return {static_cast<const bf16*>(a.key_cache) + block * a.key_block_stride + row * a.key_dim,
          static_cast<const bf16*>(a.value_cache) + block * a.value_block_stride + row * a.value_dim};
}

inline int first_key(const Task& task) { return task.key_begin / TILE_ROWS * TILE_ROWS; }

// The keys and values of a tile by stretches.
struct Place {
  int begin = 0, count = 0;
  const bf16* keys[TILE / TILE_ROWS];
  const bf16* values[TILE / TILE_ROWS];

  int stretches() const { return (count + TILE_ROWS - 1) / TILE_ROWS; }

  void locate(const PgAttention& a, const Task& task, int first_key) {
    begin = first_key;
    count = std::min(TILE, task.key_end - first_key);
    for (int i = 0; i < stretches(); ++i) {
      const Stretch stretch = pagedgen::locate(a, task, first_key + i * TILE_ROWS);
      keys[i] = stretch.keys, values[i] = stretch.values;
    }
  }
};

// Fetches keys and values into the L2 cache while those before them are computed: always the LEAD stretches that follow
// the tile, whether they are of the same task or of the thread's next one. Two lines of each of them in turn: a stretch
// ends before the processor's own prefetcher, which follows a row of lines within a page, has got far ahead in it, so it
// must follow many at a time.
class Ahead {
 public:
  explicit Ahead(const PgAttention& args)
      : a(args),
        head_strides{a.block_size * a.key_dim * 2, a.block_size * a.value_dim * 2},
        spans{TILE_ROWS * a.key_dim * 2, TILE_ROWS * a.value_dim * 2},
        longest(std::max(spans[0], spans[1])) {}

  // tile_end: the first key after the tile that is computed now. following: the thread's next task, or null.
  void begin(const Task& task, int tile_end, const Task* following) {
    const bool within = of == &task ? key >= tile_end : of && of == following;
    if (!within) of = &task, key = tile_end;
    int lead = (of == &task ? key - tile_end : std::max(0, task.key_end - tile_end) + key - first_key(*of)) / TILE_ROWS;
    stretches = stretch = head = 0, at = 0;
    for (; lead < LEAD && stretches < LEAD; ++lead, key += TILE_ROWS) {
      if (key >= of->key_end) {
        if (of == following || !following) break;
        of = following, key = first_key(*of);
      }
      if (!stretches) heads = of->kv_heads;
      if (of->kv_heads != heads) break;
      const Stretch next = locate(a, *of, key);
      keys[stretches] = reinterpret_cast<const char*>(next.keys);
      values[stretches++] = reinterpret_cast<const char*>(next.values);
    }
    if (!stretches) head = heads;
  }

  // Four lines.
  INLINE void fetch() {
    if (head == heads) return;
    const char *k = keys[stretch] + head * head_strides[0] + at, *v = values[stretch] + head * head_strides[1] + at;
    if (at < spans[0]) _mm_prefetch(k, _MM_HINT_T1), _mm_prefetch(k + 64, _MM_HINT_T1);
    if (at < spans[1]) _mm_prefetch(v, _MM_HINT_T1), _mm_prefetch(v + 64, _MM_HINT_T1);
    if (++stretch < stretches) return;
    stretch = 0, at += 128;
    if (at == longest) at = 0, ++head;
  }

  void finish() {
    while (head < heads) fetch();
  }

 private:
  const PgAttention& a;
  const int64_t head_strides[2], spans[2], longest;  // in bytes; a span is what a stretch has for one head
  const Task* of = nullptr;                          // of whose keys this one is fetched next
  int key = 0;
  const char *keys[LEAD], *values[LEAD];
  int64_t at = 0;
  int heads = 0, head = 0, stretch = 0, stretches = 0;
};

}  // namespace pagedgen
#endif
