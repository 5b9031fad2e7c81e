// Attention with AMX.
#include "attention_amx.h"
#include "attention_tasks.h"

namespace pagedgen {

bool attend_with_tiles(const PgAttention& a) {
#if defined(PAGEDGEN_TILES)
  if (tiles_cover(a)) {
    const bool spread = a.sequences >= 8 * a.threads;
    attend<bf16, TileTask>(a, spread ? a.kv_heads : 1);
    return true;
  }
#endif
  return false;
}

}  // namespace pagedgen
