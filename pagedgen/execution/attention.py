"""The one place where a backend for the kernels is chosen, and the call every model makes for its attention."""

from dataclasses import dataclass
from types import ModuleType

import torch
from pagedgen_kernels import reference

from pagedgen.execution.batch import ForwardBatch
from pagedgen.execution.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Writes a layer's new keys and values into the cache and attends over the blocks.

    name: what ran, for reports and tests: "cpp", "triton" or "torch". kernels: a module with the launchers of
        `reference`.
    note: why it is not the fastest one for the device, if so.
    """

    name: str
    kernels: ModuleType
    note: str | None = None

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: KVCache,
        *,
        scale: float,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, num_heads, key_dim], key [T, num_kv_heads, key_dim], value [T, num_kv_heads, value_dim], all of the
        cache's dtype -> [T, num_heads, value_dim].

        rotation: cosines and sines [T, rotary_dim] by which query and key are still to be rotated, if they are.
        query_norm, key_norm: [key_dim], with eps, of an RMSNorm of each head before that.
        """
        key_cache, value_cache = kv_cache.key(layer), kv_cache.value(layer)
        if rotation is None:
            assert query_norm is key_norm is None, "heads are normed only where they are rotated"
            self.kernels.write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
        else:
            query = self.kernels.rotary_write_kv(
                query,
                key,
                value,
                *rotation,
                key_cache,
                value_cache,
                batch.slot_mapping,
                query_norm=query_norm,
                key_norm=key_norm,
                eps=eps,
            )
        out: torch.Tensor = self.kernels.paged_attention(
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.context_lens,
            batch.query_start,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
        return out


def choose_backend(device: torch.device) -> AttentionBackend:
    """The C++ kernels on a CPU where they can be built, the Triton kernels on a GPU, else plain torch."""
    if device.type == "cpu":
        from pagedgen_kernels import cpu

        if cpu.available():
            return AttentionBackend("cpp", cpu)
        return AttentionBackend("torch", reference, f"the C++ kernels are not used: {cpu.unavailable_reason()}")
    from pagedgen_kernels import triton

    if triton.available():
        return AttentionBackend("triton", triton)
    return AttentionBackend("torch", reference, f"the Triton kernels are not used: {triton.unavailable_reason()}")
