"""The memory of a run by its owner."""

from dataclasses import dataclass

from pagedgen.stats.recording import Recording


@dataclass(frozen=True, slots=True)
class Owner:
    """owner: weights, KV, activations, logits, other, process or device. bytes: at its most. how: how it is known."""

    owner: str
    bytes: int
    how: str


def owners(r: Recording) -> tuple[Owner, ...]:
    """On a CPU the pool's pages are taken from the system as they are first written, so what counts is what was
    touched; what the weights, the pool and the steps do not explain is other: Python, libraries, rows under way."""
    info, on_cpu = r.sessions[-1].info, r.sessions[-1].info.device == "cpu"
    last = r.column("session") == len(r.sessions) - 1
    if not last.any():
        last = r.column("session") == r.column("session").max()
    share = r.column("peak_step_tokens")[last].max() / info.max_batch_tokens if info.max_batch_tokens else 0.0
    rows = r.column("peak_step_rows")[last].max()
    touched = int(r.column("touched_blocks")[last].max()) * r.sessions[-1].bytes_per_block
    process, device = (int(r.column(name)[last].max()) for name in ("process_bytes", "device_bytes"))
    whole = process if on_cpu else device
    known = (
        Owner("weights", info.weight_bytes, "as loaded"),
        Owner("KV", touched if on_cpu else info.kv_bytes, "blocks touched" if on_cpu else "the whole pool"),
        Owner("activations", round(info.activation_bytes * min(share, 1.0)), "measured, for the largest step"),
        Owner("logits", min(3 * 4 * info.vocab_size * int(rows), info.logits_bytes), "computed, for the largest step"),
    )
    other = max(whole - sum(owner.bytes for owner in known), 0)
    return (
        *known,
        Owner("other", other, "the rest: Python, libraries, rows" if on_cpu else "the rest of torch's memory"),
        Owner("process", process, "resident, at its most"),
        *(() if on_cpu else (Owner("device", device, "held by torch, at its most"),)),
    )
