// The two inner products of attention over one tile of keys, for few rows: straight from the cache, no repacking.
// A row is one query head at one position; q, scores and accumulators are float32.
#pragma once
#include "vec.h"

namespace pagedgen {

constexpr int MAX_ROWS = REGISTERS == 32 ? 4 : 2;       // rows that share one pass over the keys
constexpr int VALUE_VECTORS = REGISTERS == 32 ? 4 : 2;  // vectors of a value row held at a time

template <class T>
INLINE void prefetch(const T* row, int dim) {
  const char* p = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < dim * sizeof(T); at += 64) __builtin_prefetch(p + at);
}

// scores[r][t] = q[r] . keys[t] for t < count; keys and scores are readable and writable up to a multiple of 4.
// Fetches the rows of `ahead` (count of them, ahead_dim wide) meanwhile.
template <int R, class T>
void direct_scores(const float* q, int q_stride, const T* const* keys, int count, int dim, float* scores,
                   int score_stride, const T* const* ahead, int ahead_dim) {
  const int whole = dim / VL * VL;
  for (int t = 0; t < count; t += 4) {
    for (int j = t; j < t + 4 && j < count; ++j) prefetch(ahead[j], ahead_dim);
    vf sums[R][4] = {};
    for (int d = 0; d < whole; d += VL) {
      const vf k[4] = {load(keys[t] + d), load(keys[t + 1] + d), load(keys[t + 2] + d), load(keys[t + 3] + d)};
      for (int r = 0; r < R; ++r) {
        const vf x = load(q + r * q_stride + d);
        for (int j = 0; j < 4; ++j) sums[r][j] += x * k[j];
      }
    }
    if (whole < dim) {
      vf k[4];
      for (int j = 0; j < 4; ++j) k[j] = load_part(keys[t + j] + whole, dim - whole);
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j) sums[r][j] += load(q + r * q_stride + whole) * k[j];
    }
    for (int r = 0; r < R; ++r)
      store_sums(scores + r * score_stride + t, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
}

// out[r][column...] += sum over t of weights[r][t] * values[t][column...], for V vectors of columns.
// Fetches the first `ahead_count` rows of `ahead` meanwhile.
template <int R, int V, class T>
void direct_values(const float* weights, int weight_stride, const T* const* values, int count, int column, int dim,
                   float* out, int out_stride, const T* const* ahead, int ahead_count, int ahead_dim) {
  vf sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load(out + r * out_stride + column + v * VL);
  const bool whole = column + V * VL <= dim;
  for (int t = 0; t < count; ++t) {
    if (t < ahead_count) prefetch(ahead[t], ahead_dim);
    const T* row = values[t] + column;
    vf x[V];
    for (int v = 0; v < V; ++v)
      x[v] = whole || v < V - 1 ? load(row + v * VL) : load_part(row + v * VL, dim - column - v * VL);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] += weights[r * weight_stride + t] * x[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + r * out_stride + column + v * VL, sums[r][v]);
}

template <int R, class T>
void direct_values(const float* weights, int weight_stride, const T* const* values, int count, int dim, float* out,
                   int out_stride, const T* const* ahead, int ahead_count, int ahead_dim) {
  for (int column = 0; column < dim;) {
    const int vectors = (dim - column + VL - 1) / VL;
    const int fetched = column ? 0 : ahead_count;
    if (vectors >= VALUE_VECTORS) {
      direct_values<R, VALUE_VECTORS>(weights, weight_stride, values, count, column, dim, out, out_stride, ahead,
                                      fetched, ahead_dim);
      column += VALUE_VECTORS * VL;
    } else {
      direct_values<R, 1>(weights, weight_stride, values, count, column, dim, out, out_stride, ahead, fetched,
                          ahead_dim);
      column += VL;
    }
  }
}

// Calls f with the number of rows as a type, for groups of at most MAX_ROWS rows: f(first_row, integral_constant).
template <class F>
INLINE void for_row_groups(int rows, const F& f) {
  int r = 0;
  for (; r + MAX_ROWS <= rows; r += MAX_ROWS) f(r, std::integral_constant<int, MAX_ROWS>());
  if constexpr (MAX_ROWS > 3)
    if (rows - r == 3) f(r, std::integral_constant<int, 3>());
  if constexpr (MAX_ROWS > 2)
    if (rows - r == 2) f(r, std::integral_constant<int, 2>());
  if (rows - r == 1) f(r, std::integral_constant<int, 1>());
}

}  // namespace pagedgen
