#include "parallel.h"

#include <thread>
#include <vector>

#include "types.h"

namespace {
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp_parallel = nullptr;  // set once, before any kernel runs
}  // namespace

namespace pagedgen {

void run_team(void (*body)(void*), void* context, int threads) {
  if (gomp_parallel) {
    gomp_parallel(body, context, unsigned(threads), 0);
    return;
  }
  std::vector<std::thread> team;
  for (int i = 1; i < threads; ++i) team.emplace_back(body, context);
  body(context);
  for (std::thread& thread : team) thread.join();
}

}  // namespace pagedgen

// The address of GOMP_parallel in the runtime that torch loaded, so that its threads are used and none are added; null
// starts threads of our own for each call.
PAGEDGEN_EXPORT void pg_set_runtime(void* address) { gomp_parallel = reinterpret_cast<GompParallel>(address); }
