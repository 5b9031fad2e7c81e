// AMX: matrix products of 32 rows by 32 columns, accumulated in eight tile registers of 16 rows by 64 bytes.
#pragma once
#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__linux__)
#define PAGEDGEN_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

namespace pagedgen {

constexpr int TILE_ROWS = 16;    // of a register
constexpr int TILE_BYTES = 64;   // of one of its rows
constexpr int BLOCK = 32;        // rows and columns of a block: two tiles by two
constexpr int PANEL_STEP = 2048; // bytes of a panel of 32 columns for each step along the inner dimension: two tiles

// The kernel gives the large registers only to processes that ask; it says no where it knows nothing of them.
inline bool request_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return granted;
}

// What was stored before is in memory for the tile registers to read: GCC's intrinsics do not say that they read any (but
// 8 bytes of a layout), so it may drop such stores or move them behind.
INLINE void finish_stores(const void* address) { asm volatile("" : : "r"(address) : "memory"); }

// The shapes of the eight tile registers; all of them full unless changed.
struct alignas(64) TileLayout {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileLayout() {
    for (int i = 0; i < 8; ++i) row_bytes[i] = TILE_BYTES, rows[i] = TILE_ROWS;
  }

  void use() const {
    finish_stores(this);
    _tile_loadconfig(this);
  }
};

// While it lives, the thread's tile registers are set up so.
class TileScope {
 public:
  explicit TileScope(const TileLayout& layout = {}) { layout.use(); }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
};

// sums[32][32] = a[32][steps] * panel[steps][32], where a step is 64 bytes of each row: 32 numbers of bfloat16 with sums
// in float32, or 64 of int8 with sums in int32. a's rows are `stride` bytes apart. With HALF only the first 16 rows.
// With PASSING a is read past the L1 cache: it would drive the panel out, which the next rows are multiplied by as well.
// meanwhile(k) is called in each step: other work that the processor does beside the products.
template <class T, bool HALF, bool PASSING, class Meanwhile>
INLINE void multiply_block(const char* a, int64_t stride, const char* panel, int steps, void* sums,
                           const Meanwhile& meanwhile) {
  static_assert(sizeof(T) <= 2, "bf16 or int8");
  constexpr bool WIDE = sizeof(T) == 2;
  finish_stores(a);
  _tile_zero(0);
  _tile_zero(1);
  if (!HALF) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < steps; ++k) {
    _tile_loadd(6, panel + k * PANEL_STEP, TILE_BYTES);
    if (PASSING)
      _tile_stream_loadd(4, a + k * TILE_BYTES, stride);
    else
      _tile_loadd(4, a + k * TILE_BYTES, stride);
    _tile_loadd(7, panel + k * PANEL_STEP + PANEL_STEP / 2, TILE_BYTES);
    if (WIDE) {
      _tile_dpbf16ps(0, 4, 6);
      if (!HALF && PASSING) _tile_stream_loadd(5, a + TILE_ROWS * stride + k * TILE_BYTES, stride);
      if (!HALF && !PASSING) _tile_loadd(5, a + TILE_ROWS * stride + k * TILE_BYTES, stride);
      _tile_dpbf16ps(1, 4, 7);
      meanwhile(k);
      if (!HALF) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    } else {
      _tile_dpbssd(0, 4, 6);
      if (!HALF && PASSING) _tile_stream_loadd(5, a + TILE_ROWS * stride + k * TILE_BYTES, stride);
      if (!HALF && !PASSING) _tile_loadd(5, a + TILE_ROWS * stride + k * TILE_BYTES, stride);
      _tile_dpbssd(1, 4, 7);
      meanwhile(k);
      if (!HALF) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
  }
  char* out = static_cast<char*>(sums);
  constexpr int ROW = BLOCK * 4;
  _tile_stored(0, out, ROW);
  _tile_stored(1, out + TILE_BYTES, ROW);
  if (!HALF) {
    _tile_stored(2, out + TILE_ROWS * ROW, ROW);
    _tile_stored(3, out + TILE_ROWS * ROW + TILE_BYTES, ROW);
  }
}

}  // namespace pagedgen
#endif
