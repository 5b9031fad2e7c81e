// Element types by the numbers that the launchers pass.
#pragma once
#include "vec.h"

namespace pagedgen {

template <class F>
INLINE void with_type(int type, const F& f) {
  if (type == 0) f(float{});
  if (type == 1) f(bf16{});
  if (type == 2) f(f16{});
}

}  // namespace pagedgen
