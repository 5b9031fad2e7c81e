"""A StepPlan turned into the tensors of one forward pass."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.transfer import to_device
from pagedgen.step import SlotArrays, StepPlan


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of all sequences of a step, packed one sequence after the other. T tokens, S sequences, R rows of
    logits.

    input_ids, positions: int64 [T].
    slot_mapping: int64 [T], where each token's key and value go: block * block_size + offset.
    query_start: int32 [S + 1], where each sequence's tokens start in the packed row.
    context_lens: int32 [S], tokens of each sequence that attention sees, those of this step included.
    block_tables: int32 [S, B]; entries past a sequence's last block are 0 and must not be read.
    rope_lens: int64 [T], the sequence length that length-dependent rope scalings use for each token: at least the
        prompt's length and at least its position + 1, so that it does not depend on how the prompt was chunked.
    logit_rows: int64 [R], the packed positions whose logits are needed: first those of the sequences that are sampled,
        then those before each prompt position whose log-probability is wanted, both in plan order.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    rope_lens: torch.Tensor
    logit_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def build_batch(plan: StepPlan, state: SlotArrays, device: torch.device) -> ForwardBatch:
    """Gather the plan's tokens, positions, slots and tables from the slot arrays; all vectorised, no loop over
    sequences."""
    slots, starts, counts = plan.slots, plan.starts, plan.counts
    query_start = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_lens = starts + counts
    if len(slots) == query_start[-1]:  # one token each: pure decoding
        token_slots, positions, prompt_lens = slots, starts.astype(np.int64), state.num_prompt[slots]
    else:
        of_sequence = np.repeat(np.arange(len(slots)), counts)
        token_slots = slots[of_sequence]
        positions = np.arange(query_start[-1], dtype=np.int64) + (starts - query_start[:-1])[of_sequence]
        prompt_lens = state.num_prompt[token_slots]
    blocks = state.block_table[token_slots, positions // state.block_size].astype(np.int64)
    table_width = max(1, -(-int(context_lens.max(initial=1)) // state.block_size))

    return ForwardBatch(
        input_ids=to_device(state.token_ids[token_slots, positions].astype(np.int64), device),
        positions=to_device(positions, device),
        slot_mapping=to_device(blocks * state.block_size + positions % state.block_size, device),
        query_start=to_device(query_start, device),
        context_lens=to_device(context_lens, device),
        block_tables=to_device(state.block_table[slots, :table_width], device),
        rope_lens=to_device(np.maximum(positions + 1, prompt_lens), device),
        logit_rows=to_device(logit_rows(plan, state, query_start), device),
    )


def wanted_prompt_positions(plan: StepPlan, state: SlotArrays) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(sequences [P], positions [P]): the prompt positions whose log-probabilities the step gives, in plan order, each
    with the place of its sequence in the plan."""
    sequences = [i for i, slot in enumerate(plan.slots.tolist()) if slot in plan.prompt_logprobs]
    ranges = []
    for i in sequences:
        slot, start = int(plan.slots[i]), int(plan.starts[i])
        first = max(plan.prompt_logprobs[slot][0], start + 1)
        last = min(start + int(plan.counts[i]), int(state.num_prompt[slot]) - 1)
        ranges.append(np.arange(first, last + 1))
    lengths = [len(positions) for positions in ranges]
    empty = np.empty(0, np.int64)
    return np.repeat(np.array(sequences, np.int64), lengths), np.concatenate([empty, *ranges])


def logit_rows(plan: StepPlan, state: SlotArrays, query_start: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 [R]: the packed positions whose logits a step needs; see ForwardBatch."""
    last: NDArray[np.int64] = (query_start[1:] - 1)[plan.samples].astype(np.int64)
    if not plan.prompt_logprobs:
        return last
    sequences, positions = wanted_prompt_positions(plan, state)
    return np.concatenate([last, (query_start[:-1] - plan.starts)[sequences] + positions - 1])
