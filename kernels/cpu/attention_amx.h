// Attention in bfloat16 with AMX: 16 keys by a few rows at a time for the scores, straight from the cache, and as many rows
// by 16 columns of the values, of which pairs of keys are interleaved on the way. Weights are rounded to bfloat16, as in
// FlashAttention; sums are float32. A row's result does not depend on the rows beside it.
#pragma once
#include "attention_stretches.h"

#if defined(PAGEDGEN_TILES)

namespace pagedgen {

// Whether these arguments can be computed so, on a processor that has the tiles.
inline bool tiles_cover(const PgAttention& a) {
  return a.type == 1 && a.block_size % TILE_ROWS == 0 && a.key_dim % 32 == 0 && a.value_dim % 32 == 0 &&
         request_tiles();
}

template <int LANES>
class TileWorker : public Rows<bf16> {
 public:
  TileWorker(const PgAttention& args, Scratch& scratch, Ahead& ahead, const Task& task)
      : Rows<bf16>(args, scratch, task, LANES),
        key_head_stride(int64_t(args.block_size) * args.key_dim),
        value_head_stride(int64_t(args.block_size) * args.value_dim),
        steps(key_stride / 32),
        columns(value_stride / 32),
        ahead(ahead) {}

  void run(float* workspace, const Task* following) {
    const int heads = task.kv_heads;
    s.reserve(all_rows, value_stride, int64_t(all_rows) * key_stride / 2,
              int64_t(all_rows) * TILE + int64_t(all_rows) * TILE / 2, int64_t(heads) * TILE * value_stride / 2);
    turned = s.keys;
    weights = reinterpret_cast<bf16*>(s.keys + int64_t(all_rows) * TILE);
    pack_queries();
    init_rows();
    for (int key = first_key(task); key < task.key_end; key += TILE) {
      tile.locate(a, task, key);
      ahead.begin(task, key + TILE, following);
      // One kind of work after the other for all of the heads, so that none waits for what was only just stored.
      for (int h = 0; h < heads; ++h) multiply_keys(h);
      if (LANES == MANY_LANES)
        for (int h = 0; h < heads; ++h) interleave_values(h);
      for (int h = 0; h < heads; ++h) {
        for (int first = 0; first < head_rows; first += LANES) turn_scores(h * head_rows + first);
        for (int r = 0; r < rows; ++r) {
          softmax_row(h * head_rows + r, r, tile.begin, tile.count);
          if (LANES == MANY_LANES) round_weights(h * head_rows + r);
          ahead.fetch();
          ahead.fetch();
        }
        if (LANES == FEW_LANES) add_values_with_vectors(h);
      }
      if (LANES == MANY_LANES)
        for (int h = 0; h < heads; ++h)
          for (int first = 0; first < head_rows; first += LANES) add_values(h, h * head_rows + first);
      ahead.finish();
    }
    order_sums();
    finish(workspace);
  }

 private:
  // rows[16] of 16 words each -> target[16][LANES], a word of each of LANES rows beside each other.
  static void turn(const vf (&words)[VL], float* target) {
    if constexpr (LANES == MANY_LANES) {
      vf turned[VL];
      std::copy_n(words, VL, turned);
      transpose(turned);
      for (int i = 0; i < VL; ++i) store(target + i * VL, turned[i]);
    } else {
      const vf a = shuffle<Low>(words[0], words[1]), b = shuffle<Low>(words[2], words[3]);
      const vf c = shuffle<High>(words[0], words[1]), d = shuffle<High>(words[2], words[3]);
      store(target, shuffle<LowPairs>(a, b));
      store(target + VL, shuffle<HighPairs>(a, b));
      store(target + 2 * VL, shuffle<LowPairs>(c, d));
      store(target + 3 * VL, shuffle<HighPairs>(c, d));
    }
  }
  struct Low {  // words 0-7 of a and b in turn
    static constexpr int at(int i) { return i / 2 + i % 2 * VL; }
  };
  struct High {
    static constexpr int at(int i) { return i / 2 + i % 2 * VL + VL / 2; }
  };
  struct LowPairs {  // pairs of words of a and b in turn
    static constexpr int at(int i) { return i / 4 * 2 + i % 2 + i / 2 % 2 * VL; }
  };
  struct HighPairs {
    static constexpr int at(int i) { return LowPairs::at(i) + VL / 2; }
  };

  float* packed_queries(int index) const { return s.q + int64_t(index) * key_stride / 2; }

  // For each LANES rows and 32 numbers of them a tile whose rows hold a pair of numbers of each of the rows.
  void pack_queries() {
    for (int h = 0; h < task.kv_heads; ++h)
      for (int first = 0; first < head_rows; first += LANES)
        for (int step = 0; step < steps; ++step) {
          vf words[VL] = {};
          for (int i = 0; i < LANES && first + i < rows; ++i)
            std::memcpy(&words[i], query(first + i, h) + step * 32, TILE_BYTES);
          turn(words, packed_queries(h * head_rows + first) + step * TILE_ROWS * LANES);
        }
  }

  // For each LANES rows: [keys of the tile][LANES].
  void multiply_keys(int h) {
    const int64_t stride = int64_t(a.key_dim) * sizeof(bf16);
    const int stretches = tile.stretches();
    finish_stores(s.q);
    for (int first = 0; first < head_rows; first += LANES) {
      const float* q = packed_queries(h * head_rows + first);
      float* target = turned + int64_t(h * head_rows + first) * TILE;
      for (int i = 0; i < stretches; i += 2) {
        const bf16* low = tile.keys[i] + h * key_head_stride;
        const bf16* high = i + 1 < stretches ? tile.keys[i + 1] + h * key_head_stride : low;
        _tile_zero(0);
        _tile_zero(1);
        for (int step = 0; step < steps; ++step) {
          _tile_loadd(2, q + step * TILE_ROWS * LANES, LANES * 4);
          _tile_loadd(3, low + step * 32, stride);
          _tile_dpbf16ps(0, 3, 2);
          _tile_loadd(7, high + step * 32, stride);
          _tile_dpbf16ps(1, 7, 2);
          for (int i = 0; i < 4; ++i) ahead.fetch();
        }
        _tile_stored(0, target + i * TILE_ROWS * LANES, LANES * 4);
        if (i + 1 < TILE / TILE_ROWS) _tile_stored(1, target + (i + 1) * TILE_ROWS * LANES, LANES * 4);
      }
    }
  }

  // [keys][LANES] -> LANES rows of scores.
  void turn_scores(int index) {
    const float* source = turned + int64_t(index) * TILE;
    float* target = s.scores + int64_t(index) * TILE;
    for (int i = 0; i < tile.stretches(); ++i, source += TILE_ROWS * LANES) {
      vf words[LANES];
      for (int j = 0; j < LANES; ++j) words[j] = load(source + j * VL);
      if constexpr (LANES == MANY_LANES) {
        transpose(words);
      } else {
        const vf a = shuffle<Even>(words[0], words[1]), b = shuffle<Even>(words[2], words[3]);
        const vf c = shuffle<Odd>(words[0], words[1]), d = shuffle<Odd>(words[2], words[3]);
        words[0] = shuffle<EvenOfEight>(a, b), words[2] = shuffle<OddOfEight>(a, b);
        words[1] = shuffle<EvenOfEight>(c, d), words[3] = shuffle<OddOfEight>(c, d);
      }
      for (int j = 0; j < LANES; ++j) store(target + j * TILE + i * TILE_ROWS, words[j]);
      ahead.fetch();
    }
  }
  struct Even {  // of each four words of a and b the first, then the third, each as eight in a row
    static constexpr int at(int i) { return i % 8 * 4 + i / 8 * 2; }
  };
  struct Odd {
    static constexpr int at(int i) { return Even::at(i) + 1; }
  };
  struct EvenOfEight {
    static constexpr int at(int i) { return i % 8 + i / 8 * VL; }
  };
  struct OddOfEight {
    static constexpr int at(int i) { return EvenOfEight::at(i) + 8; }
  };

  // For each 32 keys and 32 columns two tiles of pairs of keys, with the columns in the order that unpacking gives. Keys
  // that are none of the task's become zero: what lies there may be anything.
  void interleave_values(int h) {
    const int64_t offset = h * value_head_stride;
    const int low = task.key_begin - tile.begin, end = round_up(tile.count, 32) / TILE_ROWS;
    for (int i = 0; i < end; ++i) {
      const int begin = i * TILE_ROWS;
      float* target = values(h) + (i / 2 * columns * 2 * TILE_ROWS + i % 2 * TILE_ROWS / 2) * VL;
      if (begin >= low && begin + TILE_ROWS <= tile.count)
        interleave(tile.values[i] + offset, target, [](int) { return ~__mmask32(0); });
      else
        interleave(tile.values[std::min(i, tile.stretches() - 1)] + offset, target,
                   [&](int t) { return __mmask32(begin + t >= low && begin + t < tile.count ? ~0u : 0); });
    }
  }

  template <class Mask>
  INLINE void interleave(const bf16* rows, float* target, const Mask& mask) {
    for (int c = 0; c < columns; ++c, rows += 32, target += 2 * TILE_ROWS * VL)
#pragma GCC unroll 8
      for (int t = 0; t < TILE_ROWS; t += 2) {
        const __m512i x = _mm512_maskz_loadu_epi16(mask(t), rows + t * a.value_dim);
        const __m512i y = _mm512_maskz_loadu_epi16(mask(t + 1), rows + (t + 1) * a.value_dim);
        _mm512_store_si512(target + t / 2 * VL, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(target + (t / 2 + TILE_ROWS) * VL, _mm512_unpackhi_epi16(x, y));
        if (t % 4 == 0) ahead.fetch();
      }
  }

  float* values(int h) const { return s.values + int64_t(h) * TILE * value_stride / 2; }

  // The row's weights, in tiles of LANES rows by 32 keys.
  void round_weights(int index) {
    const float* row = s.scores + int64_t(index) * TILE;
    bf16* target = weights + int64_t(index / LANES) * LANES * TILE + index % LANES * 32;
    for (int t = 0; t < tile.count; t += 32, target += LANES * 32) {
      const vf low = load(row + t), high = t + VL < tile.count ? load(row + t + VL) : vf{};
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(target, &both, sizeof both);
    }
  }

  // Adds the weighted values of the tile to the sums of LANES rows.
  void add_values(int h, int index) {
    const bf16* w = weights + int64_t(index) * TILE;
    float* sums = s.sums + int64_t(index) * value_stride;
    const int64_t stride = int64_t(value_stride) * sizeof(float);
    finish_stores(w);
    for (int c = 0; c < columns; ++c) {
      _tile_loadd(4, sums + c * 32, stride);
      _tile_loadd(5, sums + c * 32 + VL, stride);
      for (int t = 0; t < tile.count; t += 32) {
        const float* v = values(h) + (t / 32 * columns + c) * 512;
        _tile_loadd(6, w + t * LANES, TILE_BYTES);
        _tile_loadd(3, v, TILE_BYTES);
        _tile_dpbf16ps(4, 6, 3);
        _tile_loadd(7, v + 256, TILE_BYTES);
        _tile_dpbf16ps(5, 6, 7);
        ahead.fetch();
        ahead.fetch();
      }
      _tile_stored(4, sums + c * 32, stride);
      _tile_stored(5, sums + c * 32 + VL, stride);
    }
  }

  void add_values_with_vectors(int h) {
    const int low = std::max(0, task.key_begin - tile.begin);
    for (int c = 0; c < columns; c += 2) {
      float* sums = s.sums + int64_t(h) * head_rows * value_stride + c * 32;
      const float* w = s.scores + int64_t(h) * head_rows * TILE;
      const bool two = c + 1 < columns;
      if (rows == 4) two ? add_few<4, 2>(h, c, low, w, sums) : add_few<4, 1>(h, c, low, w, sums);
      if (rows == 3) two ? add_few<3, 2>(h, c, low, w, sums) : add_few<3, 1>(h, c, low, w, sums);
      if (rows == 2) two ? add_few<2, 2>(h, c, low, w, sums) : add_few<2, 1>(h, c, low, w, sums);
      if (rows == 1) two ? add_few<1, 2>(h, c, low, w, sums) : add_few<1, 1>(h, c, low, w, sums);
    }
  }

  template <int R, int C>
  void add_few(int h, int column, int low, const float* w, float* sums) {
    const vu upper = vu{} + 0xffff0000u;
    vf total[R][2 * C];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2 * C; ++i) total[r][i] = load(sums + r * value_stride + i * VL);
    for (int i = 0; i < tile.stretches(); ++i) {
      const bf16* row = tile.values[i] + h * value_head_stride + column * 32;
      const int begin = i * TILE_ROWS, stop = std::min(tile.count, begin + TILE_ROWS);
      row += std::max(0, low - begin) * a.value_dim;
      for (int t = std::max(low, begin); t < stop; ++t, row += a.value_dim) {
        vf x[2 * C];
        for (int j = 0; j < C; ++j) {
          vu both;
          std::memcpy(&both, row + j * 32, sizeof both);
          x[2 * j] = bit_cast<vf>(both << 16);
          x[2 * j + 1] = bit_cast<vf>(both & upper);
        }
        for (int r = 0; r < R; ++r)
          for (int j = 0; j < 2 * C; ++j) total[r][j] += w[r * TILE + t] * x[j];
        if (t % 2) ahead.fetch();
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2 * C; ++i) store(sums + r * value_stride + i * VL, total[r][i]);
  }

  // From the order of columns that unpacking gave: the first tile has numbers 0-3 of each 8, the second 4-7.
  void order_sums() {
    const __m512i first =
        LANES == FEW_LANES ? _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
                   : _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for_rows([&](int row, int, int) {
      float* sums = s.sums + int64_t(row) * value_stride;
      for (int c = 0; c < value_stride; c += 32) {
        const __m512 low = _mm512_load_ps(sums + c), high = _mm512_load_ps(sums + c + VL);
        _mm512_store_ps(sums + c, _mm512_permutex2var_ps(low, first, high));
        _mm512_store_ps(sums + c + VL, _mm512_permutex2var_ps(low, second, high));
      }
    });
  }

  const int64_t key_head_stride, value_head_stride;
  const int steps, columns;  // of 32 numbers of keys and of values
  float* turned;             // scores as the tiles give them
  bf16* weights;
  Place tile;
  Ahead& ahead;
};

// A task with as many lanes as it needs.
class TileTask {
 public:
  struct Scope {
    explicit Scope(const PgAttention& a) : ahead(a) {}

    AttentionTiles tiles;
    Ahead ahead;
  };

  static void run(const PgAttention& a, Scratch& scratch, Scope& scope, const Task& task, float* workspace,
                  const Task* following) {
    const bool few = task.count * (a.heads / a.kv_heads) <= FEW_LANES;
    scope.tiles.use(few ? FEW_LANES : MANY_LANES);
    if (few)
      TileWorker<FEW_LANES>(a, scratch, scope.ahead, task).run(workspace, following);
    else
      TileWorker<MANY_LANES>(a, scratch, scope.ahead, task).run(workspace, following);
  }
};

}  // namespace pagedgen
#endif
