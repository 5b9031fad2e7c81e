// Products of a few to a few thousand rows with weights that were laid out for AMX beforehand. A row's result depends on
// nothing but the row: sums run along the inner dimension in one order, whatever the number of rows and threads.
#include <cmath>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "parallel.h"
#include "tiles.h"

using namespace pagedgen;

#if defined(PAGEDGEN_TILES)

namespace {

constexpr int64_t CHUNK_BYTES = 512 << 10;  // of the rows that one task goes through for each panel: they stay in L2
constexpr int64_t PANEL_BYTES = 40 << 10;   // of a panel that stays in the L1 cache
constexpr int64_t LARGE_BYTES = 16 << 20;   // of results that go to memory past the caches, which they would only fill
constexpr int TASKS_PER_THREAD = 3;         // so that a thread that was held up leaves its share to the other
constexpr int MOST_PANELS = 1 << 15;        // of a task: their numbers and one bit fill 16

struct alignas(64) Sums {
  char bytes[BLOCK * BLOCK * 4];
};

// A block whose sums are complete. rows: how many of it there are; 0 for no block.
struct Finished {
  const Sums* sums = nullptr;
  int64_t first_row = 0;
  int rows = 0, first_column = 0;
};

// silu(gate) * up to some 18 bits, more than a bfloat16 has: the series of 2^x to the fifth power around whole numbers, the
// approximate reciprocal and a step of Newton's.
INLINE vf gate_times_up(vf gate, vf up) {
  // Beyond 2^120 the result is 0 to any precision. In this order a NaN stays.
  const __m512 exponent = _mm512_min_ps(_mm512_set1_ps(120.f), (__m512)(gate * -1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf r = (vf)exponent - (vf)whole;
  vf power = splat(1.3333558e-3f);
  power = power * r + 9.6181291e-3f;
  power = power * r + 5.5504109e-2f;
  power = power * r + 2.4022651e-1f;
  power = power * r + 6.9314718e-1f;
  power = power * r + 1.f;
  const vf denominator = 1.f + (vf)_mm512_scalef_ps((__m512)power, whole);
  const vf about = (vf)_mm512_rcp14_ps((__m512)denominator);
  return gate * (about * (2.f - denominator * about)) * up;
}

// The sums of `count` columns in a row of a block: scaled, with bias.
template <class T>
INLINE vf value(const PgGemm& g, const Finished& block, int r, int column, int count) {
  const char* place = block.sums->bytes + (r * BLOCK + column) * 4;
  vf v;
  if (sizeof(T) == 2) {
    v = load(reinterpret_cast<const float*>(place));
  } else {
    vi whole;
    std::memcpy(&whole, place, sizeof whole);
    v = __builtin_convertvector(whole, vf) *
        (g.rows_scale[block.first_row + r] * load_part(g.columns_scale + block.first_column + column, count));
  }
  return g.bias ? v + load_part(g.bias + block.first_column + column, count) : v;
}

// Both halves of a row, rounded to nearest even; below the smallest normal number to zero.
INLINE __m512i rounded(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

// Which rows a task computes, and its first panel.
struct Part {
  int64_t first_row, rows;
  int first_panel;
};

// Where the sums of a task go: each rounded once. GATED: each panel has 16 columns of gates and the 16 that they are for.
template <class T, bool GATED>
class Output {
 public:
  Output(const PgGemm& args, const Part&)
      : g(args),
        past_caches(args.rows * args.columns * int64_t(sizeof(bf16)) >= LARGE_BYTES &&
                    reinterpret_cast<uintptr_t>(args.out) % 64 == 0 && args.out_stride % 32 == 0) {}

  INLINE void take(const Finished& block, int begin, int end) const {
    const int columns = std::min(BLOCK, g.columns - block.first_column);
    bf16* target = static_cast<bf16*>(g.out) + (block.first_row + begin) * g.out_stride +
                   block.first_column / (GATED ? 2 : 1);
    for (int r = begin; r < end; ++r, target += g.out_stride) {
      if (GATED) {
        const vf product = gate_times_up(value<T>(g, block, r, 0, VL), value<T>(g, block, r, VL, VL));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh((__m512)product));
        continue;
      }
      if (columns == BLOCK) {
        const __m512i both = rounded(value<T>(g, block, r, 0, VL), value<T>(g, block, r, VL, VL));
        if (past_caches)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(target), both);
        else
          std::memcpy(target, &both, sizeof both);
        continue;
      }
      for (int c = 0; c < columns; c += VL) {
        const int count = std::min(VL, columns - c);
        const __m256bh half = _mm512_cvtneps_pbh((__m512)value<T>(g, block, r, c, count));
        std::memcpy(target + c, &half, count * sizeof(bf16));
      }
    }
  }

  void finish() const {}

 private:
  const PgGemm& g;
  const bool past_caches;
};

// Of each row only which column's sum is the largest once rounded, the first of equals. g.out: int64 [rows], to which
// each task adds what it found, with `LargestColumn::none` to begin with.
class LargestColumn {
 public:
  static constexpr int64_t none = INT64_MIN;

  LargestColumn(const PgGemm& args, const Part& task) : g(args), part(task), best(lanes()) {
    best.assign(size_t(part.rows), Lanes());
  }

  INLINE void take(const Finished& block, int begin, int end) {
    const int columns = g.columns - block.first_column;
    const int panel = block.first_column / BLOCK - part.first_panel;
    const __m512i even_tag = _mm512_set1_epi32(0xffff - 2 * panel), odd_tag = _mm512_set1_epi32(0xfffe - 2 * panel);
    for (int r = begin; r < end; ++r) {
      vf low = value<bf16>(g, block, r, 0, clamp(columns)), high = value<bf16>(g, block, r, VL, clamp(columns - VL));
      if (columns < BLOCK) low = keep(low, clamp(columns)), high = keep(high, clamp(columns - VL));
      const __m512i both = rounded(low, high), sign = _mm512_srai_epi16(both, 15);
      // Whole numbers in the order of the floats: what follows the sign is turned round where that is set.
      const __m512i ordered =
          _mm512_sub_epi16(_mm512_xor_si512(both, _mm512_and_si512(sign, _mm512_set1_epi16(0x7fff))), sign);
      const __m512i even = _mm512_or_si512(_mm512_slli_epi32(ordered, 16), even_tag);
      const __m512i odd = _mm512_or_si512(_mm512_and_si512(ordered, _mm512_set1_epi32(~0xffff)), odd_tag);
      __m512i* place = reinterpret_cast<__m512i*>(best[size_t(block.first_row - part.first_row + r)].keys);
      __m512i largest = _mm512_max_epi32(_mm512_load_si512(place), _mm512_max_epi32(even, odd));
      if (_mm512_cmp_ps_mask((__m512)low, (__m512)high, _CMP_UNORD_Q)) largest = _mm512_set1_epi32(INT32_MAX);
      _mm512_store_si512(place, largest);
    }
  }

  void finish() const {
    for (int64_t r = 0; r < part.rows; ++r) {
      int64_t largest = none;
      for (int lane = 0; lane < VL; ++lane) {
        const int32_t key = best[size_t(r)].keys[lane], tag = 0xffff - (key & 0xffff);
        const int64_t column = (int64_t(part.first_panel) + tag / 2) * BLOCK + 2 * lane + tag % 2;
        largest = std::max(largest, int64_t(key >> 16) * LOW_WORD + (INT32_MAX - column));
      }
      int64_t* found = static_cast<int64_t*>(g.out) + part.first_row + r;
      int64_t before = __atomic_load_n(found, __ATOMIC_RELAXED);
      while (before < largest &&
             !__atomic_compare_exchange_n(found, &before, largest, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
    }
  }

  // The column that was found, or -1 where a sum was not a number or all were -inf.
  static int64_t column(int64_t found) {
    constexpr int64_t INFINITE = 0x7f80;
    const int64_t largest = found >> 32;
    return largest > INFINITE || largest <= -INFINITE ? -1 : INT32_MAX - (found & (LOW_WORD - 1));
  }

 private:
  static constexpr int64_t LOW_WORD = int64_t(1) << 32;

  // For each of 16 pairs of columns the largest number's upper half, and below it a tag that is larger for earlier columns.
  struct alignas(64) Lanes {
    int32_t keys[VL];
    Lanes() { std::fill(keys, keys + VL, INT32_MIN); }
  };

  static std::vector<Lanes>& lanes() {
    thread_local std::vector<Lanes> kept;
    return kept;
  }

  static int clamp(int columns) { return std::max(0, std::min(VL, columns)); }
  INLINE static vf keep(vf v, int columns) {
    return (vf)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16((1u << columns) - 1), (__m512)v);
  }

  const PgGemm& g;
  const Part part;
  std::vector<Lanes>& best;
};

template <class T, class Target>
class Gemm {
 public:
  explicit Gemm(const PgGemm& args)
      : g(args),
        steps(args.inner * int(sizeof(T)) / TILE_BYTES),
        panel_bytes(int64_t(steps) * PANEL_STEP),
        panels((args.columns + BLOCK - 1) / BLOCK),
        row_bytes(args.x_stride * int64_t(sizeof(T))) {
    const int64_t inner_bytes = int64_t(args.inner) * int64_t(sizeof(T));
    chunk_rows = std::max<int64_t>(BLOCK, CHUNK_BYTES / inner_bytes / BLOCK * BLOCK);
    passing = panel_bytes <= PANEL_BYTES;
    chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    const int64_t groups = std::max<int64_t>(1, int64_t(TASKS_PER_THREAD) * args.threads / chunks);
    group_panels = int(std::min<int64_t>(MOST_PANELS, (panels + groups - 1) / groups));
  }

  void run() {
    const int64_t groups = (panels + group_panels - 1) / group_panels;
    parallel_for(chunks * groups, 1, g.threads, [&](int64_t begin, int64_t end) {
      const TileScope tiles;
      for (int64_t task = begin; task < end; ++task)
        run_task(task / groups * chunk_rows, int(task % groups) * group_panels);
      _mm_sfence();  // what was stored past the caches is seen by whoever comes next
    });
  }

 private:
  void run_task(int64_t first_row, int first_panel) const {
    const int64_t end_row = std::min(g.rows, first_row + chunk_rows);
    const int end_panel = std::min(panels, first_panel + group_panels);
    // A block of fewer rows than it has is computed from a copy, so that nothing past the last row is read.
    const int64_t whole_end = first_row + (end_row - first_row) / BLOCK * BLOCK;
    const int rest = int(end_row - whole_end);
    thread_local std::vector<char> padded;
    if (rest) {
      padded.assign(size_t(BLOCK) * steps * TILE_BYTES, 0);
      for (int r = 0; r < rest; ++r)
        std::memcpy(padded.data() + int64_t(r) * steps * TILE_BYTES, row(whole_end + r), size_t(steps) * TILE_BYTES);
    }
    const int blocks = int((end_row - first_row + BLOCK - 1) / BLOCK);
    Target target(g, {first_row, end_row - first_row, first_panel});
    Sums sums;
    Finished pending;  // whose sums are rounded and stored while the next block is computed, before it leaves its own
    for (int p = first_panel; p < end_panel; ++p) {
      const char* panel = static_cast<const char*>(g.panels) + p * panel_bytes;
      const int lines = p + 1 == panels ? 0 : (PANEL_STEP / 64 + blocks - 1) / blocks;
      const char* ahead = panel + panel_bytes;
      for (int i = 0; i < blocks; ++i, ahead += int64_t(steps) * lines * 64) {
        const int64_t r = first_row + int64_t(i) * BLOCK;
        const int each = (pending.rows + steps - 1) / steps;
        const auto meanwhile = [&](int step) {
          for (int l = 0; l < lines; ++l) _mm_prefetch(ahead + (int64_t(step) * lines + l) * 64, _MM_HINT_T1);
          target.take(pending, step * each, std::min(pending.rows, step * each + each));
        };
        if (r < whole_end && passing)
          multiply_block<T, false, true>(row(r), row_bytes, panel, steps, &sums, meanwhile);
        else if (r < whole_end)
          multiply_block<T, false, false>(row(r), row_bytes, panel, steps, &sums, meanwhile);
        else if (rest > TILE_ROWS)
          multiply_block<T, false, false>(padded.data(), int64_t(steps) * TILE_BYTES, panel, steps, &sums, meanwhile);
        else
          multiply_block<T, true, false>(padded.data(), int64_t(steps) * TILE_BYTES, panel, steps, &sums, meanwhile);
        pending = {&sums, r, r < whole_end ? BLOCK : rest, p * BLOCK};
      }
    }
    target.take(pending, 0, pending.rows);
    target.finish();
  }

  const char* row(int64_t r) const { return static_cast<const char*>(g.x) + r * row_bytes; }

  const PgGemm& g;
  const int steps;
  const int64_t panel_bytes;
  const int panels;
  const int64_t row_bytes;
  int64_t chunk_rows, chunks;
  bool passing;
  int group_panels;
};

}  // namespace

PAGEDGEN_EXPORT int pg_gemm_available() { return request_tiles(); }

PAGEDGEN_EXPORT void pg_gemm(const PgGemm* args) {
  if (args->bits == 16)
    args->gated ? Gemm<bf16, Output<bf16, true>>(*args).run() : Gemm<bf16, Output<bf16, false>>(*args).run();
  else
    args->gated ? Gemm<int8_t, Output<int8_t, true>>(*args).run() : Gemm<int8_t, Output<int8_t, false>>(*args).run();
}

// Of bfloat16. out: int64 [rows], the first column of the largest result of each row, or -1 for none.
PAGEDGEN_EXPORT void pg_gemm_argmax(const PgGemm* args) {
  int64_t* out = static_cast<int64_t*>(args->out);
  std::fill(out, out + args->rows, LargestColumn::none);
  Gemm<bf16, LargestColumn>(*args).run();
  std::transform(out, out + args->rows, out, LargestColumn::column);
}

#else

PAGEDGEN_EXPORT int pg_gemm_available() { return 0; }
PAGEDGEN_EXPORT void pg_gemm(const PgGemm*) {}
PAGEDGEN_EXPORT void pg_gemm_argmax(const PgGemm*) {}

#endif

// weight [columns, inner] of `item` bytes each -> panels of 32 columns, padded with zeros: for each 64 bytes of inner
// two tiles, whose rows hold what 16 columns have of 4 bytes of inner. inner * item is a multiple of 64.
PAGEDGEN_EXPORT void pg_pack_panels(const void* weight, int64_t columns, int64_t inner, int item, void* out,
                                    int threads) {
  const char* source = static_cast<const char*>(weight);
  const int64_t row_bytes = inner * item, steps = row_bytes / 64;
  parallel_for((columns + 31) / 32, 4, threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      char* target = static_cast<char*>(out) + p * steps * 2048;
      std::memset(target, 0, size_t(steps) * 2048);
      for (int64_t c = p * 32; c < std::min(columns, p * 32 + 32); ++c)
        for (int64_t k = 0; k < row_bytes / 4; ++k)
          std::memcpy(target + k / 16 * 2048 + (c % 32) / 16 * 1024 + k % 16 * 64 + c % 16 * 4,
                      source + c * row_bytes + k * 4, 4);
    }
  });
}
