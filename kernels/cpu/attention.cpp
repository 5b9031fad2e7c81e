// Attention of packed queries over a paged cache, with vectors in any of the types, or where they can with AMX's tiles.
#include "attention.h"
#include "attention_rows.h"
#include "attention_tasks.h"
#include "attention_tile.h"
#include "dispatch.h"

using namespace pagedgen;

namespace {

constexpr int DIRECT_ROWS = 8;  // up to here reading straight from the cache beats packing

// For one key/value head.
template <class T>
class VectorWorker : public Rows<T> {
  using Rows<T>::a, Rows<T>::s, Rows<T>::task, Rows<T>::rows, Rows<T>::head_rows, Rows<T>::key_stride,
      Rows<T>::value_stride;

 public:
  struct Scope {
    explicit Scope(const PgAttention&) {}
  };

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

}  // namespace

PAGEDGEN_EXPORT void pg_paged_attention(const PgAttention* args) {
  if (attend_with_tiles(*args)) return;
  with_type(args->type, [&](auto tag) { attend<decltype(tag), VectorWorker<decltype(tag)>>(*args, 1); });
}
