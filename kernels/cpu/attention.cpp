// Attention of packed queries over a paged cache: online softmax over tiles of keys, as in FlashAttention (Dao et al.,
// 2022), one task for each (sequence, key/value heads, tile of query positions, split of the context).
#include "attention.h"
#include "attention_amx.h"
#include "attention_rows.h"
#include "attention_tile.h"
#include "dispatch.h"
#include "parallel.h"

using namespace pagedgen;

namespace {

constexpr int QUERY_ROWS = 96;    // rows of a query tile: what amortises packing the keys, and fits the L2 cache
constexpr int DIRECT_ROWS = 8;    // up to here reading straight from the cache beats packing
constexpr int FEW_ROWS = 4;       // of queries for each key/value head, for which reading the keys is most of the work
constexpr int SPLIT_KEYS = 1024;  // a lone query tile splits its context here, wherever it runs: sums never depend on
                                  // the number of threads or on the rest of the batch

// With vectors, in any of the types; for one key/value head.
template <class T>
class VectorWorker : public Rows<T> {
  using Rows<T>::a, Rows<T>::s, Rows<T>::task, Rows<T>::rows, Rows<T>::head_rows, Rows<T>::key_stride,
      Rows<T>::value_stride;

 public:
  struct Scope {};

  static void run(const PgAttention& a, Scratch& scratch, Scope&, const Task& task, float* workspace,
                  const Task* following) {
    VectorWorker(a, scratch, task).run(workspace, following);
  }

  VectorWorker(const PgAttention& args, Scratch& scratch, const Task& task)
      : Rows<T>(args, scratch, task, is_direct(args, task) ? 1 : GEMM_ROWS), direct(is_direct(args, task)) {}

  // following: the task that this thread runs next, or null; its first keys are fetched ahead.
  void run(float* workspace, const Task* following) {
    s.reserve(head_rows, value_stride, int64_t(head_rows) * key_stride, direct ? 0 : TILE * key_stride,
              direct ? 0 : TILE * value_stride);
    load_queries();
    this->init_rows();
    tile.locate(a, task, task.key_begin);
    while (tile.count > 0) {
      next.count = 0;
      if (tile.begin + TILE < task.key_end)
        next.locate(a, task, tile.begin + TILE);
      else if (following)
        next.locate(a, *following, following->key_begin);
      compute_scores();
      for (int r = 0; r < rows; ++r) this->softmax_row(r, r, tile.begin, tile.count);
      add_values();
      if (tile.begin + TILE >= task.key_end) break;
      std::swap(tile, next);
    }
    this->finish(workspace);
  }

 private:
  static bool is_direct(const PgAttention& a, const Task& task) {
    return task.count * (a.heads / a.kv_heads) <= DIRECT_ROWS;
  }

  void load_queries() {
    for (int r = 0; r < rows; ++r)
      for (int d = 0; d < a.key_dim; d += VL)
        store(s.q + r * key_stride + d, load_part(this->query(r, 0) + d, a.key_dim - d));
    std::fill(s.q + rows * key_stride, s.q + head_rows * key_stride, 0.f);
    std::fill(s.scores + rows * TILE, s.scores + head_rows * TILE, 0.f);
  }

  void compute_scores() {
    if (direct) {
      for_row_groups(rows, [&](int r, auto count) {
        direct_scores<count.value>(s.q + r * key_stride, key_stride, tile.keys, tile.count, a.key_dim,
                                   s.scores + r * TILE, TILE, tile.values, a.value_dim);
      });
    } else {
      pack_keys(tile.keys, tile.count, a.key_dim, s.keys, TILE);
      gemm<false>(s.q, key_stride, s.keys, TILE, head_rows, a.key_dim, round_up(tile.count, VL), s.scores, TILE);
    }
  }

  void add_values() {
    if (direct) {
      for_row_groups(rows, [&](int r, auto count) {
        direct_values<count.value>(s.scores + r * TILE, TILE, tile.values, tile.count, a.value_dim,
                                   s.sums + r * value_stride, value_stride, next.keys, next.count, a.key_dim);
      });
    } else {
      pack_values(tile.values, tile.count, a.value_dim, s.values, value_stride);
      gemm<true>(s.scores, TILE, s.values, value_stride, head_rows, tile.count, value_stride, s.sums, value_stride);
    }
  }

  const bool direct;
  Tile<T> tile, next;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<std::pair<size_t, int>> split;  // first task of each split group, number of its tasks
  int64_t workspace = 0;
};

// heads: how many key/value heads a task takes where there are few queries: their keys lie side by side.
void plan_sequence(const PgAttention& a, int sequence, int heads, Plan& plan) {
  const int group = a.heads / a.kv_heads, positions = std::max(1, QUERY_ROWS / group);
  const int query_len = a.query_start[sequence + 1] - a.query_start[sequence];
  const int before = a.context_lens[sequence] - query_len;
  const int together = query_len * group <= FEW_ROWS ? heads : 1;
  for (int kv_head = 0; kv_head < a.kv_heads; kv_head += together)
    for (int first = 0; first < query_len; first += positions) {
      const int count = std::min(positions, query_len - first);
      const int begin = a.window ? std::max(0, before + first - a.window + 1) : 0, end = before + first + count;
      const int parts = query_len <= positions ? (end - begin + SPLIT_KEYS - 1) / SPLIT_KEYS : 1;
      if (parts > 1) plan.split.emplace_back(plan.tasks.size(), parts);
      for (int i = 0; i < parts; ++i) {
        const int kv_heads = std::min(together, a.kv_heads - kv_head);
        Task task{sequence, kv_head, kv_heads, first, count, begin + i * SPLIT_KEYS, end, -1};
        if (parts > 1) {
          task.key_end = std::min(end, task.key_begin + SPLIT_KEYS);
          task.partial = plan.workspace;
          plan.workspace += Rows<float>::partial_size(a, task);
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
    cost[i] = int64_t(task.key_end - task.key_begin) * (task.count + 2) * task.kv_heads;
    total += cost[i];
    longest = std::max(longest, cost[i]);
  }
  if (longest * threads * 32 > total)
    std::sort(order.begin(), order.end(), [&](uint32_t x, uint32_t y) { return cost[x] > cost[y]; });
  return order;
}

// Worker::Scope: what a thread sets up for its tasks.
template <class T, class Worker>
void attend(const PgAttention& a, int heads) {
  Plan plan;
  for (int i = 0; i < a.sequences; ++i) plan_sequence(a, i, heads, plan);
  const std::vector<uint32_t> order = task_order(plan, a.threads);
  std::vector<float> workspace(plan.workspace);
  const int64_t count = int64_t(order.size());
  const int64_t grain = std::clamp<int64_t>(count / (16 * a.threads), 1, 8);  // a thread knows its next task within it
  parallel_for(count, grain, a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    typename Worker::Scope scope;
    for (int64_t i = begin; i < end; ++i) {
      const Task* following = i + 1 < end ? &plan.tasks[order[i + 1]] : nullptr;
      Worker::run(a, scratch, scope, plan.tasks[order[i]], workspace.data(), following);
    }
  });
  parallel_for(int64_t(plan.split.size()), 4, a.threads, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const Task& first = plan.tasks[plan.split[i].first];
      Rows<T>(a, scratch, first, 1).combine(workspace.data(), plan.split[i].second);
    }
  });
}

}  // namespace

PAGEDGEN_EXPORT void pg_paged_attention(const PgAttention* args) {
#if defined(PAGEDGEN_TILES)
  if (tiles_cover(*args)) {
    const bool spread = args->sequences >= 8 * args->threads;
    return attend<bf16, TileTask>(*args, spread ? args->kv_heads : 1);
  }
#endif
  with_type(args->type, [&](auto tag) { attend<decltype(tag), VectorWorker<decltype(tag)>>(*args, 1); });
}
