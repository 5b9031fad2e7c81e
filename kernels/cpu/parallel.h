// Work shared out over the threads of the OpenMP runtime that the process already has.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pagedgen {

// Runs body(context) once on each of `threads` threads and waits for them.
void run_team(void (*body)(void*), void* context, int threads);

// Calls f(begin, end) for ranges of at most `grain` that cover [0, count), in order of begin, as threads become free.
template <class F>
void parallel_for(int64_t count, int64_t grain, int threads, const F& f) {
  struct Context {
    const F& f;
    std::atomic<int64_t> next;
    int64_t count, grain;
  } context{f, {0}, count, grain};
  const auto body = [](void* pointer) {
    Context& c = *static_cast<Context*>(pointer);
    for (int64_t begin; (begin = c.next.fetch_add(c.grain, std::memory_order_relaxed)) < c.count;)
      c.f(begin, std::min(begin + c.grain, c.count));
  };
  const int64_t team = std::min<int64_t>(threads, (count + grain - 1) / grain);
  if (team > 1)
    run_team(body, &context, int(team));
  else
    body(&context);
}

}  // namespace pagedgen
