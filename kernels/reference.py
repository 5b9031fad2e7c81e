"""Every kernel in plain torch: what the other backends are tested against, and the path of last resort.

Shapes: T packed tokens, S sequences, R rows of logits, B blocks in the widest table, V the vocabulary. Hq query heads
in groups of Hq / Hkv share a key/value head. Key and value caches are [num_blocks, Hkv, block_size, Dk or Dv].
Arithmetic is float32, results are rounded once to the dtype of the inputs.
"""

from collections.abc import Iterable, Iterator

import torch

Tensor = torch.Tensor

# SplitMix64 (Steele, Lea and Flood, 2014): the increment of its counter and the multipliers of its finaliser, as int64.
COUNTER_STEP = 0x9E3779B97F4A7C15 - 2**64
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9 - 2**64
SECOND_MULTIPLIER = 0x94D049BB133111EB - 2**64
SCORE_BYTES = 32 << 20  # bounds the attention scores held at a time, whatever the queries and the context
ROWS_AT_ONCE = 16  # bounds what is held at a time in float64 or int64 of a whole vocabulary, like its noise


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store the new keys [T, Hkv, Dk] and values [T, Hkv, Dv] in the cache, in place.

    slot_mapping: int64 [T], block * block_size + offset of each token, or -1 for a token that fills a batch up and is
    not stored; the others are distinct.
    """
    block_size = key_cache.shape[2]
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    key_cache[slots // block_size, :, slots % block_size] = key[stored]
    value_cache[slots // block_size, :, slots % block_size] = value[stored]


def rotary_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`apply_rotary`, then `write_kv` of the rotated keys: returns the rotated query [T, Hq, D].

    query_norm, key_norm: [D], the weight of an `rms_norm` of each head, with eps, before the rotation.
    """
    if query_norm is not None:
        query = rms_norm(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm(key, key_norm, eps)
    query, key = apply_rotary(query, key, cos, sin)
    write_kv(key, value, key_cache, value_cache, slot_mapping)
    return query


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over the blocks of their sequences: [T, Hq, Dk] -> [T, Hq, Dv].

    block_tables: int32 [S, B]; entries past a sequence's last block are never read, nor are slots past its context.
    context_lens: int32 [S], tokens of each sequence in the cache, those of this step included. query_start: int32
        [S + 1], where each sequence's queries start; the last is T. Query i of a sequence with n queries sits at
        position context_len - n + i. The queries of a sequence without context, which fill a batch up, get zeros.
    sliding_window: a key is visible when key_position > query_position - sliding_window (None: all up to the query's
    own). softcap: scores become softcap * tanh(score / softcap) before they are masked. sinks: [Hq], a logit for each
    head that takes part in the softmax's denominator only.
    """
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    starts = query_start.tolist()
    block_size = key_cache.shape[2]
    for s, context in enumerate(context_lens.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        if not context:
            out[begin:end] = 0
            continue
        blocks = block_tables[s, : -(-context // block_size)].long()
        keys = key_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context].float()
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context].float()
        positions = torch.arange(context - (end - begin), context, device=query.device)
        size = max(1, SCORE_BYTES // (4 * query.shape[1] * context))
        for chunk, part in zip(query[begin:end].split(size), positions.split(size), strict=True):
            visible = _visible(part, context, sliding_window)
            out[begin : begin + len(chunk)] = _attend(chunk, keys, values, visible, scale, softcap, sinks)
            begin += len(chunk)
    return out


def _visible(positions: Tensor, context: int, sliding_window: int | None) -> Tensor:
    """bool [queries, context]: which keys each query position sees."""
    key_positions = torch.arange(context, device=positions.device)
    visible = key_positions <= positions[:, None]
    if sliding_window is not None:
        visible &= key_positions > positions[:, None] - sliding_window
    return visible


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [n, Hq, Dk], float32 keys [Hkv, L, Dk] and values [Hkv, L, Dv], visible [n, L] -> [n, Hq, Dv]."""
    count, num_heads = query.shape[:2]
    num_kv_heads = keys.shape[0]
    grouped = query.float().view(count, num_kv_heads, num_heads // num_kv_heads, -1).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(-1, -2) * scale  # [Hkv, group, n, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    out = weights @ values[:, None]
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, -1).to(query.dtype)


def copy_blocks(pools: Iterable[Tensor], copies: Tensor) -> None:
    """Copy blocks within each pool [layers, num_blocks, ...], in place and in all layers.

    copies: integers [C, 2], (source, destination). Destinations are distinct, and none of them is a source.
    """
    sources, destinations = copies.long().unbind(1)
    for pool in pools:
        pool[:, destinations] = pool[:, sources]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] divided by the root of its mean square (plus eps), times weight [H] (Zhang and Sennrich, 2019)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of x + residual, x + residual); the sum is rounded to the dtype of x before it is normed."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: silu of the first half times the second half."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] -> [T, I]: gelu, in its approximation by tanh, of the first half times the second half."""
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query [T, Hq, D] and key [T, Hkv, D] by position (Su et al., 2021), pairing dimension i with i + rot / 2.

    cos, sin: [T, rot], both halves given; dimensions from rot on pass through.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    low, high = turned.chunk(2, -1)
    turned = turned * cos.float()[:, None] + torch.cat((-high, low), -1) * sin.float()[:, None]
    return torch.cat((turned.to(x.dtype), passed), -1)


def greedy_argmax(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    """int64 [N]: the token with the largest logit of each row of [R, V], the lowest on ties.

    -1 for a row that holds a NaN or nothing above -inf. rows: int64 [N], the rows to look at; all of them by default.
    """
    if rows is not None:
        logits = logits[rows]
    top = logits.amax(-1, keepdim=True)  # NaN when any is
    vocab_size = logits.shape[-1]
    tokens = torch.arange(vocab_size, device=logits.device)
    winner = torch.where(logits == top, tokens, vocab_size).amin(-1)
    usable = top.squeeze(-1) > -torch.inf
    return torch.where(usable, winner, -1)


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, keys: Tensor, rows: Tensor | None = None, lowest: Tensor | None = None
) -> Tensor:
    """int64 [N]: a draw from softmax(logits / temperature) of each row of [R, V], by the Gumbel-max trick.

    The token with the largest logits / temperature + gumbel_noise, in float32, the lowest on ties; a logit of -inf
    never wins; -1 for a row that holds a NaN or nothing above -inf. temperature: float32 [N], positive. keys: int64 or
    uint64 [N]. rows: int64 [N], the row of each draw; by default draw i is from row i. lowest: float32 [N], the least
    value of logits / temperature that may win, at most the row's largest; by default any may. A draw depends on its
    row's logits, temperature and lowest and its key alone.
    """
    out = torch.empty(keys.shape[0], dtype=torch.int64, device=logits.device)
    tokens = torch.arange(logits.shape[-1], device=logits.device)[None]
    for part in _slices(keys.shape[0]):
        scaled = _rows_of(logits, rows, part) / temperature[part, None].float()
        if lowest is not None:
            scaled.masked_fill_(scaled < lowest[part, None], -torch.inf)
        out[part] = greedy_argmax(scaled + gumbel_noise(keys[part], tokens.expand(scaled.shape)))
    return out


def lowest_kept(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """float32 [N]: the least value of logits / temperature that the filters of each row of [R, V] keep.

    They apply in the order top-k, top-p, min-p: of the tokens likelier than it, one that is kept has less than k, which
    have less than p of the mass of all that top-k left; and it has at least min-p of the likeliest one's probability.
    So tokens that tie are kept or dropped together. temperature, top_p, min_p: float32 [N]. top_k: int64 [N], 0 is off.
    rows: int64 [N], the rows to look at; all of them by default. For a row that holds a NaN or nothing above -inf the
    value means nothing.
    """
    vocab_size = logits.shape[1]
    out = torch.empty(temperature.shape[0], device=logits.device)
    for part in _slices(temperature.shape[0]):
        values = (_rows_of(logits, rows, part) / temperature[part, None]).sort(1, descending=True).values
        count = torch.where(top_k[part] > 0, top_k[part].clamp(max=vocab_size), vocab_size)
        kth = values.gather(1, count[:, None] - 1)
        masses = (values - values[:, :1]).exp().double().masked_fill_(values < kth, 0.0)
        before = masses.cumsum(1) - masses
        within = (before < top_p[part, None] * masses.sum(1, keepdim=True)) | (top_p[part, None] >= 1)
        nucleus = values.masked_fill(~within, torch.inf).amin(1)
        out[part] = torch.maximum(torch.maximum(kth[:, 0], nucleus), values[:, 0] + min_p[part].log())
    return out


def choose_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """int64 [R]: the next token of each row of [R, V]: that of `greedy_argmax` where the temperature is 0, else that of
    `gumbel_argmax` among what `lowest_kept` leaves.

    temperature, top_p, min_p: float32 [R]. top_k: int32 or int64 [R]. keys: int64 or uint64 [R]. Off are a top_k of 0,
    a top_p of 1 and a min_p of 0.
    """
    tokens = greedy_argmax(logits)
    drawn = (temperature > 0).nonzero().squeeze(1)
    settings = temperature[drawn], top_k[drawn].long(), top_p[drawn], min_p[drawn]
    lowest = lowest_kept(logits, *settings, drawn)
    tokens[drawn] = gumbel_argmax(logits, temperature[drawn], keys.view(torch.int64)[drawn], drawn, lowest)
    return tokens


def top_tokens(
    logits: Tensor, temperature: Tensor, k: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values float32 [N, k], ids int64 [N, k], total float32 [N]): the k largest logits of each row of [R, V] in
    descending order, the lowest id first on ties, and the logsumexp of the whole row divided by its temperature.

    k: from 1 to V. Where a row has fewer than k logits above -inf, the rest are -inf with the id 0. A row that holds a
    NaN has a total of NaN, and its values and ids mean nothing. temperature: float32 [N], positive. rows: int64 [N],
    the rows to look at; all of them by default.
    """
    count, vocab_size = temperature.shape[0], logits.shape[1]
    values = torch.empty(count, k, device=logits.device)
    ids = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    total = torch.empty(count, device=logits.device)
    later = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    for part in _slices(count):
        wide = _rows_of(logits, rows, part)
        bits = (wide + 0.0).view(torch.int32)  # the sum makes -0 a 0
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers that order as the floats do
        ids[part] = vocab_size - 1 - ((order << 32 | later).topk(k).values & 0xFFFFFFFF)
        values[part] = wide.gather(1, ids[part])
        total[part] = torch.logsumexp(wide / temperature[part, None], 1)
    return values, ids.masked_fill_(values == -torch.inf, 0), total


def _slices(count: int) -> Iterator[slice]:
    """[0, count) in parts of ROWS_AT_ONCE."""
    return (slice(begin, begin + ROWS_AT_ONCE) for begin in range(0, count, ROWS_AT_ONCE))


def _rows_of(logits: Tensor, rows: Tensor | None, part: slice) -> Tensor:
    """float32 [n, V]: a part of the rows, or of those that `rows` names."""
    return (logits[part] if rows is None else logits[rows[part]]).float()


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [R, K]: standard Gumbel noise, a function of each row's key (int64 or uint64 [R]) and the token id [R,
    K].

    In 64-bit arithmetic modulo 2^64 with logical shifts, z = key + (token + 1) * 0x9E3779B97F4A7C15, then the finaliser
    of SplitMix64: z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9; z = (z ^ z >> 27) * 0x94D049BB133111EB; z = z ^ z >> 31. With
    u the top 32 bits of z and v = (u + 0.5) / 2^32, the noise is -log(-log1p(-v)), computed in float64 and rounded once
    to float32, so that implementations agree although their logarithms differ in the last place. It lies between -3.14
    and 22.88, and is finest where it is largest.
    """
    bits = _shift_right(_mixed(keys[:, None], token_ids), 32)
    v = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v)).float()


def position_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """int64 [R]: the key of each sequence's draw at one position: SplitMix64 of its key (int64 or uint64 [R]) and the
    position (int32 or int64 [R]), as `gumbel_noise` mixes keys and token ids."""
    return _mixed(keys, positions)


def _mixed(keys: Tensor, counters: Tensor) -> Tensor:
    z = keys.view(torch.int64) + (counters.to(torch.int64) + 1) * COUNTER_STEP
    z = (z ^ _shift_right(z, 30)) * FIRST_MULTIPLIER
    z = (z ^ _shift_right(z, 27)) * SECOND_MULTIPLIER
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, count: int) -> Tensor:
    """The logical shift of int64 seen as uint64: torch shifts the sign bit in."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def penalise(
    scores: Tensor,
    token_ids: Tensor,
    lengths: Tensor,
    num_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    rows: Tensor,
) -> None:
    """Penalise the tokens that occurred, in scores float32 [N, V], in place.

    First every token of a row's sequence is divided by its repetition penalty where its score is positive, else
    multiplied by it (Keskar et al., 2019). Then each token of the completion loses presence + frequency * how often it
    occurs there. Off are a repetition of 1, a presence of 0 and a frequency of 0.

    token_ids: int32 [max_seqs, max_len]. rows: int64 [N], the sequence of each row of scores, a row of token_ids.
    lengths, num_prompt: int32 or int64 [N], how many tokens a row's sequence has, and how many of these are its
    prompt. repetition, presence, frequency: float32 [N].
    """
    width = int(lengths.max()) if len(lengths) else 0
    if not width:
        return
    positions = torch.arange(width, device=scores.device)
    known, completion = positions < lengths[:, None], positions >= num_prompt[:, None]
    # Past its end a sequence repeats its first token; one that has none has token 0, which is left as it is.
    ids = torch.where(known, token_ids[rows, :width], token_ids[rows, :1] * (lengths > 0)[:, None]).long()
    before, factor = scores.gather(1, ids), torch.where(lengths > 0, repetition, 1.0)[:, None]
    penalised = torch.where(before < 0, before * factor, before / factor)
    counts = torch.zeros_like(scores).scatter_add_(1, ids, (known & completion).float()).gather(1, ids)
    loss = torch.where(counts > 0, counts * frequency[:, None] + presence[:, None], 0.0)
    scores.scatter_(1, ids, penalised - loss)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N] -> int8 [..., N] from -127 to 127 and float32 scales [..., 1] with x = values * scale, as nearly as that
    goes: symmetric, the largest magnitude of a row is 127. A row that holds NaN or infinity has a scale of NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    inverse = torch.where((largest > 0) & largest.isfinite(), 127 / largest, torch.zeros_like(largest))
    values = torch.nan_to_num(wide * inverse).round().to(torch.int8)
    return values, torch.where(largest.isfinite(), largest / 127, torch.full_like(largest, torch.nan))


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] by a weight int8 [out, in] with float32 scales [out, 1], one for each output: the rows of x are
    quantized as by `quantize_rows`, the products summed exactly. Gives x's dtype."""
    values, row_scales = quantize_rows(x)
    sums = (values.double() @ weight.double().T).float()
    out = sums * (row_scales * scales.T)
    return (out if bias is None else out + bias.float()).to(x.dtype)
