// What the ways of computing paged attention share: the arguments, the tasks that the work is cut into, where a tile of
// keys lies, and the rows of queries with their online softmax.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace pagedgen {

constexpr int TILE = 64;  // keys at a time
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

struct Task {
  int sequence, kv_head, kv_heads;  // kv_heads: how many, from kv_head on
  int first, count;                 // query positions, counted from the sequence's first query
  int key_begin, key_end;
  int64_t partial;  // where an unfinished part goes in the workspace; -1: the task covers the whole context
};

// What a thread keeps from task to task. Rows are query heads at one position.
struct Scratch {
  std::vector<float> storage;
  float *q, *scores, *sums, *maxima, *totals, *keys, *values;

  // In floats: q, keys and values; rows of TILE scores and of value_stride sums.
  void reserve(int rows, int value_stride, int64_t q_size, int64_t keys_size, int64_t values_size) {
    const int64_t sizes[] = {q_size, int64_t(rows) * TILE, int64_t(rows) * value_stride, rows, rows, keys_size,
                             values_size};
    float** const parts[] = {&q, &scores, &sums, &maxima, &totals, &keys, &values};
    int64_t needed = 16;
    for (int64_t size : sizes) needed += (size + 15) / 16 * 16;
    if (int64_t(storage.size()) < needed) storage.resize(needed);
    uintptr_t at = (reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64;
    for (int i = 0; i < 7; ++i) {
      *parts[i] = reinterpret_cast<float*>(at);
      at += (sizes[i] + 15) / 16 * 16 * sizeof(float);
    }
  }
};

// The keys and values of one tile for a task's first key/value head: where each of their rows lies.
template <class T>
struct Tile {
  int begin = 0, count = 0;
  const T* keys[TILE];
  const T* values[TILE];

  // The tile of a task that starts at this key. The keys are padded to a multiple of 4 with the last one.
  void locate(const PgAttention& a, const Task& task, int first_key) {
    begin = first_key;
    count = std::min(TILE, task.key_end - begin);
    const int32_t* table = a.block_tables + task.sequence * a.table_stride;
    int block = begin / a.block_size, offset = begin % a.block_size;
    for (int t = 0; t < count; ++block, offset = 0) {
      const int64_t row = int64_t(task.kv_head) * a.block_size;
      const T* block_keys = static_cast<const T*>(a.key_cache) + table[block] * a.key_block_stride;
      const T* block_values = static_cast<const T*>(a.value_cache) + table[block] * a.value_block_stride;
      for (int stop = std::min(count, t + a.block_size - offset); t < stop; ++t, ++offset) {
        keys[t] = block_keys + (row + offset) * a.key_dim;
        values[t] = block_values + (row + offset) * a.value_dim;
      }
    }
    for (int t = count; t % 4; ++t) keys[t] = keys[count - 1];
  }
};

// The rows of a task's queries: for each of its key/value heads `head_rows` of them, of which the first `rows` are used.
template <class T>
class Rows {
 public:
  Rows(const PgAttention& args, Scratch& scratch, const Task& task, int row_multiple)
      : a(args),
        s(scratch),
        task(task),
        group(a.heads / a.kv_heads),
        rows(task.count * group),
        head_rows(round_up(rows, row_multiple)),
        all_rows(head_rows * task.kv_heads),
        key_stride(round_up(a.key_dim, VL)),
        value_stride(round_up(a.value_dim, VL)),
        query_len(a.query_start[task.sequence + 1] - a.query_start[task.sequence]),
        first_position(a.context_lens[task.sequence] - query_len + task.first) {}

  // What a split of the context leaves for `combine`, in floats.
  static int64_t partial_size(const PgAttention& a, const Task& task) {
    return int64_t(task.kv_heads) * task.count * (a.heads / a.kv_heads) * (2 + round_up(a.value_dim, VL));
  }

  // Combines what the splits of a context left; the task is the first of them.
  void combine(const float* workspace, int splits) {
    const int64_t size = partial_size(a, task);
    std::vector<float> sums(value_stride);
    const float* first = workspace + task.partial;
    for_rows([&](int, int r, int h) {
      float maximum = NEGATIVE_INFINITY, total = 0;
      for (int i = 0; i < splits; ++i) maximum = std::max(maximum, first[i * size]);
      std::fill(sums.begin(), sums.end(), 0.f);
      for (int i = 0; i < splits; ++i) {
        const float* part = first + i * size;
        if (part[0] == NEGATIVE_INFINITY && part[1] == 0) continue;  // no visible key in this split
        const float weight = std::exp(part[0] - maximum);
        total += weight * part[1];
        for (int d = 0; d < value_stride; ++d) sums[d] += weight * part[2 + d];
      }
      store_row(r, h, sums.data(), total);
      first += 2 + value_stride;
    });
  }

 protected:
  // f(index of a row, its number within its key/value head, that head counted from the task's first)
  template <class F>
  INLINE void for_rows(const F& f) const {
    for (int h = 0; h < task.kv_heads; ++h)
      for (int r = 0; r < rows; ++r) f(h * head_rows + r, r, h);
  }

  int head(int r, int h) const { return (task.kv_head + h) * group + r % group; }
  int64_t token(int r) const { return a.query_start[task.sequence] + task.first + r / group; }
  const T* query(int r, int h) const {
    return static_cast<const T*>(a.query) + token(r) * a.query_token_stride + head(r, h) * a.query_head_stride;
  }

  void init_rows() {
    const bool with_sink = a.sinks && task.key_begin == first_visible(task.first);
    for_rows([&](int row, int r, int h) {
      s.maxima[row] = with_sink ? a.sinks[head(r, h)] : NEGATIVE_INFINITY;
      s.totals[row] = with_sink ? 1.f : 0.f;
    });
    std::fill_n(s.sums, int64_t(all_rows) * value_stride, 0.f);
  }

  int first_visible(int query) const {
    const int position = first_position - task.first + query;
    return a.window ? std::max(0, position - a.window + 1) : 0;
  }

  // Turns a row of scores of the tile that begins with a key, `count` of them, into weights relative to the row's running
  // maximum, and rescales its sums to that maximum.
  void softmax_row(int index, int r, int begin, int count) {
    const int query = task.first + r / group;
    const int low = first_visible(query) - begin, high = first_position + r / group + 1 - begin;
    float* row = s.scores + int64_t(index) * TILE;
    const int columns = round_up(count, VL);
    const vi first = splat(low), last = splat(std::min(high, count));
    vi lane;
    for (int i = 0; i < VL; ++i) lane[i] = i;
    vf top = splat(s.maxima[index]);
    for (int c = 0; c < columns; c += VL) {
      vf x = load(row + c) * a.scale;
      if (a.softcap > 0) x = a.softcap * tanh(x / a.softcap);
      const vi column = lane + c;
      x = ((column >= first) & (column < last)) ? x : splat(NEGATIVE_INFINITY);
      store(row + c, x);
      top = max(x, top);
    }
    const float maximum = max_lanes(top);
    if (maximum == NEGATIVE_INFINITY) {  // nothing visible yet, or only scores of -inf or NaN
      for (int c = 0; c < columns; c += VL) {
        const vf x = load(row + c);
        const vf weight = x == x ? vf{} : x;
        store(row + c, weight);
        s.totals[index] += sum_lanes(weight);
      }
      return;
    }
    vf total{};
    for (int c = 0; c < columns; c += VL) {
      const vf weight = exp(load(row + c) - maximum);
      store(row + c, weight);
      total += weight;
    }
    if (maximum != s.maxima[index]) {
      const float shrink = exp(splat(s.maxima[index] - maximum))[0];
      s.totals[index] *= shrink;
      for (int d = 0; d < value_stride; d += VL) {
        float* p = s.sums + int64_t(index) * value_stride + d;
        store(p, load(p) * shrink);
      }
      s.maxima[index] = maximum;
    }
    s.totals[index] += sum_lanes(total);
  }

  void finish(float* workspace) {
    if (task.partial < 0) {
      for_rows([&](int row, int r, int h) { store_row(r, h, s.sums + int64_t(row) * value_stride, s.totals[row]); });
      return;
    }
    float* part = workspace + task.partial;
    for_rows([&](int row, int, int) {
      *part++ = s.maxima[row];
      *part++ = s.totals[row];
      std::copy_n(s.sums + int64_t(row) * value_stride, value_stride, part);
      part += value_stride;
    });
  }

  void store_row(int r, int h, const float* sums, float total) {
    T* target = static_cast<T*>(a.out) + (token(r) * a.heads + head(r, h)) * a.value_dim;
    for (int d = 0; d < a.value_dim; d += VL) store_part(target + d, load(sums + d) / total, a.value_dim - d);
  }

  const PgAttention& a;
  Scratch& s;
  const Task& task;
  const int group, rows, head_rows, all_rows, key_stride, value_stride, query_len, first_position;
};

}  // namespace pagedgen
