// Attention of packed queries over a paged cache: online softmax over tiles of keys, as in FlashAttention (Dao et al.,
// 2022), one task for each (sequence, key/value head, tile of query positions, split of the context).
#include <cmath>
#include <limits>
#include <vector>

#include "attention_rows.h"
#include "attention_tile.h"
#include "dispatch.h"
#include "parallel.h"

using namespace pagedgen;

namespace {

constexpr int TILE = 64;          // keys at a time
constexpr int TILE_ROWS = 96;     // rows of a query tile: what amortises packing the keys, and fits the L2 cache
constexpr int DIRECT_ROWS = 8;    // up to here reading straight from the cache beats packing
constexpr int SPLIT_KEYS = 1024;  // a lone query tile splits its context here, wherever it runs: sums never depend on
                                  // the number of threads or on the rest of the batch
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

}  // namespace

extern "C" struct PgAttention {
  const void* query;
  int64_t query_token_stride, query_head_stride;
  const void* key_cache;    // [blocks, kv_heads, block_size, key_dim]
  const void* value_cache;  // [blocks, kv_heads, block_size, value_dim]
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* context_lens;
  const int32_t* query_start;
  const float* sinks;  // [heads] or null
  void* out;           // [tokens, heads, value_dim]
  int32_t type, sequences, heads, kv_heads, block_size, key_dim, value_dim;
  int32_t window;        // 0: none
  float scale, softcap;  // softcap 0: none
  int32_t threads;
};

namespace {

struct Task {
  int sequence, kv_head;
  int first, count;  // query positions, counted from the sequence's first query
  int key_begin, key_end;
  int64_t partial;  // where an unfinished part goes in the workspace; -1: the task covers the whole context
};

struct Scratch {
  std::vector<float> storage;
  float *q, *scores, *sums, *maxima, *totals, *keys, *values;

  void reserve(int rows, int key_dim, int value_dim, bool pack) {
    const size_t sizes[] = {size_t(rows) * key_dim,
                            size_t(rows) * TILE,
                            size_t(rows) * value_dim,
                            size_t(rows),
                            size_t(rows),
                            pack ? size_t(TILE) * key_dim : 0,
                            pack ? size_t(TILE) * value_dim : 0};
    float** const parts[] = {&q, &scores, &sums, &maxima, &totals, &keys, &values};
    size_t needed = 16;
    for (size_t size : sizes) needed += (size + 15) / 16 * 16;
    if (storage.size() < needed) storage.resize(needed);
    uintptr_t at = (reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64;
    for (int i = 0; i < 7; ++i) {
      *parts[i] = reinterpret_cast<float*>(at);
      at += (sizes[i] + 15) / 16 * 16 * sizeof(float);
    }
  }
};

// The keys and values of one tile: where each of their rows lies.
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
      const int64_t row = (int64_t(table[block]) * a.kv_heads + task.kv_head) * a.block_size;
      for (int stop = std::min(count, t + a.block_size - offset); t < stop; ++t, ++offset) {
        keys[t] = static_cast<const T*>(a.key_cache) + (row + offset) * a.key_dim;
        values[t] = static_cast<const T*>(a.value_cache) + (row + offset) * a.value_dim;
      }
    }
    for (int t = count; t % 4; ++t) keys[t] = keys[count - 1];
  }
};

template <class T>
class Worker {
 public:
  Worker(const PgAttention& args, Scratch& scratch, const Task& task)
      : a(args),
        s(scratch),
        task(task),
        group(a.heads / a.kv_heads),
        rows(task.count * group),
        direct(rows <= DIRECT_ROWS),
        padded_rows(direct ? rows : round_up(rows, GEMM_ROWS)),
        key_stride(round_up(a.key_dim, VL)),
        value_stride(round_up(a.value_dim, VL)),
        query_len(a.query_start[task.sequence + 1] - a.query_start[task.sequence]),
        first_position(a.context_lens[task.sequence] - query_len + task.first) {}

  // following: the task that this thread runs next, or null; its first keys are fetched ahead.
  void run(float* workspace, const Task* following) {
    s.reserve(padded_rows, key_stride, value_stride, !direct);
    load_queries();
    init_rows();
    tile.locate(a, task, task.key_begin);
    while (tile.count > 0) {
      next.count = 0;
      if (tile.begin + TILE < task.key_end)
        next.locate(a, task, tile.begin + TILE);
      else if (following)
        next.locate(a, *following, following->key_begin);
      compute_scores();
      for (int r = 0; r < rows; ++r) softmax_row(r);
      add_values();
      if (tile.begin + TILE >= task.key_end) break;
      std::swap(tile, next);
    }
    if (task.partial < 0)
      for (int r = 0; r < rows; ++r) store_row(r, s.sums + r * value_stride, s.totals[r]);
    else
      store_partial(workspace + task.partial);
  }

  // Combines the partial results of the splits of one (sequence, head); this task is the first of them.
  void combine(const float* workspace, int splits) {
    const int64_t size = partial_size();
    s.reserve(1, 0, value_stride, false);
    for (int r = 0; r < rows; ++r) {
      float maximum = NEGATIVE_INFINITY, total = 0;
      for (int i = 0; i < splits; ++i) maximum = std::max(maximum, workspace[i * size + 2 * r]);
      std::fill_n(s.sums, value_stride, 0.f);
      for (int i = 0; i < splits; ++i) {
        const float* part = workspace + i * size;
        if (part[2 * r] == NEGATIVE_INFINITY && part[2 * r + 1] == 0) continue;  // no visible key in this split
        const float weight = std::exp(part[2 * r] - maximum);
        total += weight * part[2 * r + 1];
        for (int d = 0; d < value_stride; ++d) s.sums[d] += weight * part[2 * rows + r * value_stride + d];
      }
      store_row(r, s.sums, total);
    }
  }

  int64_t partial_size() const { return int64_t(rows) * (2 + value_stride); }

 private:
  int head(int r) const { return task.kv_head * group + r % group; }
  int64_t token(int r) const { return a.query_start[task.sequence] + task.first + r / group; }

  void load_queries() {
    for (int r = 0; r < rows; ++r) {
      const T* source =
          static_cast<const T*>(a.query) + token(r) * a.query_token_stride + head(r) * a.query_head_stride;
      for (int d = 0; d < a.key_dim; d += VL) store(s.q + r * key_stride + d, load_part(source + d, a.key_dim - d));
    }
    std::fill(s.q + rows * key_stride, s.q + padded_rows * key_stride, 0.f);
    std::fill(s.scores + rows * TILE, s.scores + padded_rows * TILE, 0.f);
  }

  void init_rows() {
    const bool with_sink = a.sinks && task.key_begin == first_visible(task.first);
    for (int r = 0; r < rows; ++r) {
      s.maxima[r] = with_sink ? a.sinks[head(r)] : NEGATIVE_INFINITY;
      s.totals[r] = with_sink ? 1.f : 0.f;
    }
    std::fill_n(s.sums, padded_rows * value_stride, 0.f);
  }

  int first_visible(int query) const {
    const int position = first_position - task.first + query;
    return a.window ? std::max(0, position - a.window + 1) : 0;
  }

  void compute_scores() {
    if (direct) {
      for_row_groups(rows, [&](int r, auto count) {
        direct_scores<count.value>(s.q + r * key_stride, key_stride, tile.keys, tile.count, a.key_dim,
                                   s.scores + r * TILE, TILE, tile.values, a.value_dim);
      });
    } else {
      pack_keys(tile.keys, tile.count, a.key_dim, s.keys, TILE);
      gemm<false>(s.q, key_stride, s.keys, TILE, padded_rows, a.key_dim, round_up(tile.count, VL), s.scores, TILE);
    }
  }

  // Turns a row of scores into weights relative to the row's running maximum and rescales its sums to that maximum.
  void softmax_row(int r) {
    const int query = task.first + r / group;
    const int low = first_visible(query) - tile.begin, high = first_position + r / group + 1 - tile.begin;
    float* row = s.scores + r * TILE;
    const int columns = round_up(tile.count, VL);
    const vi first = splat(low), last = splat(std::min(high, tile.count));
    vi lane;
    for (int i = 0; i < VL; ++i) lane[i] = i;
    vf top = splat(s.maxima[r]);
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
        s.totals[r] += sum_lanes(weight);
      }
      return;
    }
    vf total{};
    for (int c = 0; c < columns; c += VL) {
      const vf weight = exp(load(row + c) - maximum);
      store(row + c, weight);
      total += weight;
    }
    if (maximum != s.maxima[r]) {
      const float shrink = std::exp(s.maxima[r] - maximum);
      s.totals[r] *= shrink;
      for (int d = 0; d < value_stride; d += VL) {
        float* p = s.sums + r * value_stride + d;
        store(p, load(p) * shrink);
      }
      s.maxima[r] = maximum;
    }
    s.totals[r] += sum_lanes(total);
  }

  void add_values() {
    if (direct) {
      for_row_groups(rows, [&](int r, auto count) {
        direct_values<count.value>(s.scores + r * TILE, TILE, tile.values, tile.count, a.value_dim,
                                   s.sums + r * value_stride, value_stride, next.keys, next.count, a.key_dim);
      });
    } else {
      pack_values(tile.values, tile.count, a.value_dim, s.values, value_stride);
      gemm<true>(s.scores, TILE, s.values, value_stride, padded_rows, tile.count, value_stride, s.sums, value_stride);
    }
  }

  void store_row(int r, const float* sums, float total) {
    T* target = static_cast<T*>(a.out) + (token(r) * a.heads + head(r)) * a.value_dim;
    for (int d = 0; d < a.value_dim; d += VL) store_part(target + d, load(sums + d) / total, a.value_dim - d);
  }

  void store_partial(float* part) {
    for (int r = 0; r < rows; ++r) {
      part[2 * r] = s.maxima[r];
      part[2 * r + 1] = s.totals[r];
    }
    std::copy_n(s.sums, rows * value_stride, part + 2 * rows);
  }

  const PgAttention& a;
  Scratch& s;
  const Task& task;
  const int group, rows;
  const bool direct;
  const int padded_rows, key_stride, value_stride, query_len, first_position;
  Tile<T> tile, next;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<std::pair<size_t, int>> split;  // first task of each split group, number of its tasks
  int64_t workspace = 0;
};

void plan_sequence(const PgAttention& a, int sequence, Plan& plan) {
  const int group = a.heads / a.kv_heads, positions = std::max(1, TILE_ROWS / group);
  const int query_len = a.query_start[sequence + 1] - a.query_start[sequence];
  const int before = a.context_lens[sequence] - query_len;
  for (int kv_head = 0; kv_head < a.kv_heads; ++kv_head)
    for (int first = 0; first < query_len; first += positions) {
      const int count = std::min(positions, query_len - first);
      const int begin = a.window ? std::max(0, before + first - a.window + 1) : 0, end = before + first + count;
      const int parts = query_len <= positions ? (end - begin + SPLIT_KEYS - 1) / SPLIT_KEYS : 1;
      if (parts > 1) plan.split.emplace_back(plan.tasks.size(), parts);
      for (int i = 0; i < parts; ++i) {
        Task task{sequence, kv_head, first, count, begin + i * SPLIT_KEYS, end, -1};
        if (parts > 1) {
          task.key_end = std::min(end, task.key_begin + SPLIT_KEYS);
          task.partial = plan.workspace;
          plan.workspace += int64_t(count) * group * (2 + round_up(a.value_dim, VL));
        }
        plan.tasks.push_back(task);
      }
    }
}

// The order in which threads take tasks: as planned when they are small, else the longest first.
std::vector<uint32_t> task_order(const Plan& plan, int threads) {
  std::vector<uint32_t> order(plan.tasks.size());
  std::vector<int64_t> cost(plan.tasks.size());
  int64_t total = 0, longest = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const Task& task = plan.tasks[i];
    order[i] = uint32_t(i);
    cost[i] = int64_t(task.key_end - task.key_begin) * (task.count + 2);
    total += cost[i];
    longest = std::max(longest, cost[i]);
  }
  if (longest * threads * 32 > total)
    std::sort(order.begin(), order.end(), [&](uint32_t x, uint32_t y) { return cost[x] > cost[y]; });
  return order;
}

template <class T>
void attend(const PgAttention& a) {
  Plan plan;
  for (int i = 0; i < a.sequences; ++i) plan_sequence(a, i, plan);
  const std::vector<uint32_t> order = task_order(plan, a.threads);
  std::vector<float> workspace(plan.workspace);
  const int64_t count = int64_t(order.size());
  const int64_t grain = std::clamp<int64_t>(count / (16 * a.threads), 1, 8);  // a thread knows its next task within it
  parallel_for(count, grain, a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const Task* following = i + 1 < end ? &plan.tasks[order[i + 1]] : nullptr;
      Worker<T>(a, scratch, plan.tasks[order[i]]).run(workspace.data(), following);
    }
  });
  parallel_for(int64_t(plan.split.size()), 4, a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const Task& first = plan.tasks[plan.split[i].first];
      Worker<T>(a, scratch, first).combine(workspace.data() + first.partial, plan.split[i].second);
    }
  });
}

}  // namespace

PAGEDGEN_EXPORT void pg_paged_attention(const PgAttention* args) {
  with_type(args->type, [&](auto tag) { attend<decltype(tag)>(*args); });
}
