// Products of a few to a few thousand rows with weights that were laid out for AMX beforehand. A row's result depends on
// nothing but the row: sums run along the inner dimension in one order, whatever the number of rows and threads.
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

// Where sums go: scaled, with bias, rounded once. GATED: each panel has 16 columns of gates and the 16 that they are for.
template <class T, bool GATED>
class Output {
 public:
  explicit Output(const PgGemm& args)
      : g(args),
        past_caches(args.rows * args.columns * int64_t(sizeof(bf16)) >= LARGE_BYTES &&
                    reinterpret_cast<uintptr_t>(args.out) % 64 == 0 && args.out_stride % 32 == 0) {}

  INLINE void store_rows(const Finished& block, int begin, int end) const {
    const int columns = std::min(BLOCK, g.columns - block.first_column);
    bf16* target = static_cast<bf16*>(g.out) + (block.first_row + begin) * g.out_stride +
                   block.first_column / (GATED ? 2 : 1);
    for (int r = begin; r < end; ++r, target += g.out_stride) {
      if (GATED) {
        const vf product = gate_times_up(value(block, r, 0, VL), value(block, r, VL, VL));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh((__m512)product));
        continue;
      }
      if (columns == BLOCK) {
        const vf low = value(block, r, 0, VL), high = value(block, r, VL, VL);
        // Rounded to nearest even; below the smallest normal number to zero.
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        if (past_caches)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(target), (__m512i)both);
        else
          std::memcpy(target, &both, sizeof both);
        continue;
      }
      for (int c = 0; c < columns; c += VL) {
        const int count = std::min(VL, columns - c);
        const __m256bh half = _mm512_cvtneps_pbh((__m512)value(block, r, c, count));
        std::memcpy(target + c, &half, count * sizeof(bf16));
      }
    }
  }

 private:
  INLINE vf value(const Finished& block, int r, int column, int count) const {
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

  const PgGemm& g;
  const bool past_caches;
};

template <class T, bool GATED>
class Gemm {
 public:
  explicit Gemm(const PgGemm& args)
      : g(args),
        steps(args.inner * int(sizeof(T)) / TILE_BYTES),
        panel_bytes(int64_t(steps) * PANEL_STEP),
        panels((args.columns + BLOCK - 1) / BLOCK),
        row_bytes(args.x_stride * int64_t(sizeof(T))),
        output(args) {
    const int64_t inner_bytes = int64_t(args.inner) * int64_t(sizeof(T));
    chunk_rows = std::max<int64_t>(BLOCK, CHUNK_BYTES / inner_bytes / BLOCK * BLOCK);
    passing = panel_bytes <= PANEL_BYTES;
    chunks = (args.rows + chunk_rows - 1) / chunk_rows;
    const int64_t groups = std::max<int64_t>(1, int64_t(TASKS_PER_THREAD) * args.threads / chunks);
    group_panels = int(std::max<int64_t>(1, (panels + groups - 1) / groups));
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
          output.store_rows(pending, step * each, std::min(pending.rows, step * each + each));
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
    output.store_rows(pending, 0, pending.rows);
  }

  const char* row(int64_t r) const { return static_cast<const char*>(g.x) + r * row_bytes; }

  const PgGemm& g;
  const int steps;
  const int64_t panel_bytes;
  const int panels;
  const int64_t row_bytes;
  const Output<T, GATED> output;
  int64_t chunk_rows, chunks;
  bool passing;
  int group_panels;
};

}  // namespace

PAGEDGEN_EXPORT int pg_gemm_available() { return request_tiles(); }

PAGEDGEN_EXPORT void pg_gemm(const PgGemm* args) {
  if (args->bits == 16)
    args->gated ? Gemm<uint16_t, true>(*args).run() : Gemm<uint16_t, false>(*args).run();
  else
    args->gated ? Gemm<int8_t, true>(*args).run() : Gemm<int8_t, false>(*args).run();
}

#else

PAGEDGEN_EXPORT int pg_gemm_available() { return 0; }
PAGEDGEN_EXPORT void pg_gemm(const PgGemm*) {}

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
