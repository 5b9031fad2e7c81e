// Element types without arithmetic, and the linkage of exported functions, for units that need no vectors: the headers of
// those take the compiler half a second each time.
#pragma once
#include <cstdint>

#define PAGEDGEN_EXPORT extern "C" __attribute__((visibility("default")))

namespace pagedgen {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

}  // namespace pagedgen
