// The two inner products of attention over one tile of keys, for many rows: keys and values are converted to float32
// once, keys transposed, and both products run through one register-blocked matrix product.
#pragma once
#include "vec.h"

namespace pagedgen {

constexpr int GEMM_ROWS = REGISTERS == 32 ? 6 : 4;
constexpr int GEMM_VECTORS = REGISTERS == 32 ? 4 : 2;

// c[GEMM_ROWS][V * VL] = (or +=) a[GEMM_ROWS][depth] b[depth][V * VL]
template <int V, bool ADD>
void gemm_block(const float* a, int a_stride, const float* b, int b_stride, int depth, float* c, int c_stride) {
  vf sums[GEMM_ROWS][V];
  for (int r = 0; r < GEMM_ROWS; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = ADD ? load(c + r * c_stride + v * VL) : vf{};
  for (int k = 0; k < depth; ++k) {
    vf row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + k * b_stride + v * VL);
    for (int r = 0; r < GEMM_ROWS; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] += a[r * a_stride + k] * row[v];
  }
  for (int r = 0; r < GEMM_ROWS; ++r)
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * VL, sums[r][v]);
}

// rows is a multiple of GEMM_ROWS, columns of VL.
template <bool ADD>
void gemm(const float* a, int a_stride, const float* b, int b_stride, int rows, int depth, int columns, float* c,
          int c_stride) {
  for (int column = 0; column < columns;) {
    const bool wide = columns - column >= GEMM_VECTORS * VL;
    for (int r = 0; r < rows; r += GEMM_ROWS) {
      const float* a_rows = a + r * a_stride;
      float* target = c + r * c_stride + column;
      if (wide)
        gemm_block<GEMM_VECTORS, ADD>(a_rows, a_stride, b + column, b_stride, depth, target, c_stride);
      else
        gemm_block<1, ADD>(a_rows, a_stride, b + column, b_stride, depth, target, c_stride);
    }
    column += wide ? GEMM_VECTORS * VL : VL;
  }
}

// packed[d][t] = keys[t][d]; columns from count up to a multiple of VL become zero. packed has round_up(dim, VL) rows.
template <class T>
void pack_keys(const T* const* keys, int count, int dim, float* packed, int stride) {
  for (int t = 0; t < count; t += VL)
    for (int d = 0; d < dim; d += VL) {
      vf rows[VL];
      for (int i = 0; i < VL; ++i) rows[i] = t + i < count ? load_part(keys[t + i] + d, dim - d) : vf{};
      transpose(rows);
      for (int i = 0; i < VL; ++i) store(packed + (d + i) * stride + t, rows[i]);
    }
}

template <class T>
void pack_values(const T* const* values, int count, int dim, float* packed, int stride) {
  for (int t = 0; t < count; ++t)
    for (int d = 0; d < dim; d += VL) store(packed + t * stride + d, load_part(values[t] + d, dim - d));
}

}  // namespace pagedgen
