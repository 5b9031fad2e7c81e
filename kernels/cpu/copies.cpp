// Moves of whole rows and blocks: writing new keys and values into the cache, copying blocks.
#include <cstring>

#include "parallel.h"
#include "types.h"

using namespace pagedgen;

namespace {

// rows [tokens, heads, row_bytes] with byte strides -> cache [blocks, heads, block_size, row_bytes], whose blocks are
// block_bytes apart; a row with a negative slot goes nowhere
void scatter_rows(const char* rows, int64_t token_stride, int64_t head_stride, char* cache, int64_t block_bytes,
                  const int64_t* slots, int64_t begin, int64_t end, int heads, int block_size, int64_t row_bytes) {
  for (int64_t t = begin; t < end; ++t) {
    if (slots[t] < 0) continue;
    const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
    const char* source = rows + t * token_stride;
    char* target = cache + block * block_bytes + offset * row_bytes;
    for (int h = 0; h < heads; ++h)
      std::memcpy(target + h * block_size * row_bytes, source + h * head_stride, row_bytes);
  }
}

}  // namespace

PAGEDGEN_EXPORT void pg_write_kv(const char* key, int64_t key_token_stride, int64_t key_head_stride, const char* value,
                                 int64_t value_token_stride, int64_t value_head_stride, char* key_cache,
                                 char* value_cache, int64_t key_block_bytes, int64_t value_block_bytes,
                                 const int64_t* slots, int64_t tokens, int heads, int block_size,
                                 int64_t key_bytes, int64_t value_bytes, int threads) {
  parallel_for(tokens, 32, threads, [&](int64_t begin, int64_t end) {
    scatter_rows(key, key_token_stride, key_head_stride, key_cache, key_block_bytes, slots, begin, end, heads,
                 block_size, key_bytes);
    scatter_rows(value, value_token_stride, value_head_stride, value_cache, value_block_bytes, slots, begin, end, heads,
                 block_size, value_bytes);
  });
}

// pool [layers, num_blocks, block_bytes]; copies [count, 2]: no destination is a source or occurs twice.
PAGEDGEN_EXPORT void pg_copy_blocks(char* pool, int64_t layers, int64_t num_blocks, int64_t block_bytes,
                                    const int64_t* copies, int64_t count, int threads) {
  parallel_for(layers * count, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* layer = pool + i / count * num_blocks * block_bytes;
      const int64_t* copy = copies + i % count * 2;
      std::memcpy(layer + copy[1] * block_bytes, layer + copy[0] * block_bytes, block_bytes);
    }
  });
}
