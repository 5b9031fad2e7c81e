// Attention as tasks that threads take: online softmax over tiles of keys, as in FlashAttention (Dao et al., 2022), one
// task for each (sequence, key/value heads, tile of query positions, split of the context).
#pragma once
#include "attention.h"
#include "parallel.h"

namespace pagedgen {

constexpr int QUERY_ROWS = 96;    // rows of a query tile: what amortises packing the keys, and fits the L2 cache
constexpr int FEW_ROWS = 4;       // of queries for each key/value head, for which reading the keys is most of the work
constexpr int SPLIT_KEYS = 1024;  // a lone query tile splits its context here, wherever it runs: sums never depend on
                                  // the number of threads or on the rest of the batch

// With the tile registers of AMX, in a unit of its own; false where the processor or the arguments do not allow it.
bool attend_with_tiles(const PgAttention& a);

struct Plan {
  std::vector<Task> tasks;
  std::vector<std::pair<size_t, int>> split;  // first task of each split group, number of its tasks
  int64_t workspace = 0;
};

// heads: how many key/value heads a task takes where there are few queries: their keys lie side by side.
inline void plan_sequence(const PgAttention& a, int sequence, int heads, Plan& plan) {
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
inline std::vector<uint32_t> task_order(const Plan& plan, int threads) {
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
  std::atomic<int64_t> taken{0};
  const auto take = [&]() -> const Task* {
    const int64_t i = taken.fetch_add(1, std::memory_order_relaxed);
    return i < count ? &plan.tasks[order[i]] : nullptr;
  };
  const int threads = int(std::min<int64_t>(a.threads, count));
  parallel_for(threads, 1, threads, [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    typename Worker::Scope scope(a);
    for (const Task *task = take(), *following; task; task = following) {
      following = take();  // taken before it is begun, so that its keys can be fetched ahead
      Worker::run(a, scratch, scope, *task, workspace.data(), following);
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

}  // namespace pagedgen
