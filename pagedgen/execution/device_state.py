"""What the device itself knows of the running sequences, so that a step can follow on tokens that no host has seen."""

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.batch import ForwardBatch, logit_rows
from pagedgen.execution.transfer import to_device
from pagedgen.step import SlotArrays, StepPlan

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def to_enter(tokens: torch.Tensor) -> torch.Tensor:
    """int32 [N], what the device goes on with for the tokens int64 [N] that were drawn: 0 for -1, which tells the host
    of logits that are not usable. Until the host ends that sequence, its tokens serve the device as indices.
    """
    return tokens.clamp(min=0).int()


class DeviceState:
    """The device's copy of SlotArrays, by slot; the last row is nobody's, for the padding of fixed-size steps.

    token_ids: int32 [max_seqs + 1, max_model_len]. block_table: int32 [max_seqs + 1, blocks].
    num_tokens: int64 [max_seqs + 1], tokens it has, those among them too that only the device knows.
    num_prompt, top_k, key: int64 [max_seqs + 1]; temperature, top_p, min_p, repetition_penalty, presence_penalty,
    frequency_penalty: float32 [max_seqs + 1].

    `send` brings it up to date for the sequences of a step and sends only what changed: it remembers what it sent, and
    that each step's tokens are entered by the device. Nothing here waits for the device.
    """

    def __init__(self, state: SlotArrays, device: torch.device) -> None:
        self.device, self.block_size = device, state.block_size
        max_seqs, max_model_len = state.token_ids.shape
        rows, blocks = max_seqs + 1, state.block_table.shape[1]
        self.nobody = max_seqs
        self.token_ids = torch.zeros(rows, max_model_len, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.num_tokens = torch.ones(rows, dtype=torch.int64, device=device)
        self.num_prompt = torch.ones(rows, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.key = torch.zeros(rows, dtype=torch.int64, device=device)
        self._floats = torch.zeros(rows, len(FLOATS), device=device)
        self.temperature, self.top_p, self.min_p = (self._floats[:, i] for i in range(3))
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = (
            self._floats[:, i] for i in range(3, 6)
        )
        # What was sent: the epoch of each slot, how many tokens the device has, and its table.
        self._epoch = np.full(max_seqs, -1, np.int64)
        self._length = np.zeros(max_seqs, np.int64)
        self._table = np.full((max_seqs, blocks), -1, np.int32)

    def send(self, plan: StepPlan, state: SlotArrays) -> None:
        """Send what the device does not know yet of the plan's sequences."""
        slots = plan.slots
        new = slots[self._epoch[slots] != state.epoch[slots]]
        if len(new):
            self._epoch[new], self._length[new], self._table[new] = state.epoch[new], 0, -1
            self._send_parameters(new, state)
        self._send_tokens(slots, state)
        self._send_blocks(slots, int((plan.starts + plan.counts).max(initial=1)), state)

    def batch(self, plan: StepPlan, state: SlotArrays) -> ForwardBatch:
        """The step's tensors, made on the device; the state must have been sent."""
        slots, starts, counts = plan.slots, plan.starts, plan.counts
        query_start = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        of_sequence = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[of_sequence]
        rows = logit_rows(plan, state, query_start.astype(np.int32))
        parts = (slots[of_sequence], positions, slots, query_start, starts + counts, rows)
        packed = to_device(np.concatenate([part.astype(np.int64) for part in parts]), self.device)
        token_slots, places, of_slots, query, context, wanted = torch.split(packed, [len(part) for part in parts])
        width = max(1, -(-int((starts + counts).max(initial=1)) // self.block_size))
        return ForwardBatch(
            input_ids=self.token_ids[token_slots, places].long(),
            positions=places,
            slot_mapping=self.slot_mapping(token_slots, places),
            query_start=query.int(),
            context_lens=context.int(),
            block_tables=self.block_table[:, :width][of_slots],
            rope_lens=torch.maximum(places + 1, self.num_prompt[token_slots]),
            logit_rows=wanted,
        )

    def slot_mapping(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where in the cache each token goes: int64 [T]."""
        blocks = self.block_table[slots, positions // self.block_size].long()
        return blocks * self.block_size + positions % self.block_size

    def enter(self, slots: NDArray[np.int32], tokens: torch.Tensor) -> None:
        """Let each of the slots [N] go on with the token int64 [N] that it drew on the device."""
        rows = to_device(slots.astype(np.int64), self.device)
        self.token_ids[rows, self.num_tokens[rows]] = to_enter(tokens)
        self.num_tokens[rows] += 1
        self.entered(slots)

    def entered(self, slots: NDArray[np.int32]) -> None:
        """Note that each of the slots has one token more, which the device has entered by itself."""
        self._length[slots] += 1

    def _send_parameters(self, slots: NDArray[np.int32], state: SlotArrays) -> None:
        rows = to_device(slots.astype(np.int64), self.device)
        whole = (state.num_prompt[slots], state.top_k[slots], state.key[slots].view(np.int64))
        sent = to_device(np.stack(whole), self.device)
        for name, values in zip((self.num_prompt, self.top_k, self.key), sent, strict=True):
            name[rows] = values
        floats = np.stack([getattr(state, name)[slots] for name in FLOATS], axis=1)
        self._floats[rows] = to_device(floats, self.device)

    def _send_tokens(self, slots: NDArray[np.int32], state: SlotArrays) -> None:
        """Tokens that the host knows and the device does not: of prompts, and of beams, which the host chooses."""
        missing = state.num_tokens[slots] - self._length[slots]
        some = np.flatnonzero(missing > 0)
        if not len(some):
            return
        slots, missing = slots[some], missing[some]
        row = np.repeat(slots, missing)
        first = np.cumsum(missing) - missing
        position = np.arange(len(row)) + np.repeat(self._length[slots] - first, missing)
        self._length[slots] = state.num_tokens[slots]
        parts = (row, position, state.token_ids[row, position], slots, self._length[slots])
        packed = to_device(np.concatenate([part.astype(np.int64) for part in parts]), self.device)
        rows, positions, tokens, of, lengths = torch.split(packed, [len(part) for part in parts])
        self.token_ids[rows, positions] = tokens.int()
        self.num_tokens[of] = lengths

    def _send_blocks(self, slots: NDArray[np.int32], longest: int, state: SlotArrays) -> None:
        width = -(-longest // self.block_size)
        table = state.block_table[slots, :width]
        changed = (table != self._table[slots, :width]) & (np.arange(width) < state.num_blocks[slots][:, None])
        sequence, index = np.nonzero(changed)
        if not len(sequence):
            return
        row, block = slots[sequence], table[sequence, index]
        self._table[row, index] = block
        packed = to_device(np.stack([row, index, block]).astype(np.int64), self.device)
        self.block_table[packed[0], packed[1]] = packed[2].int()
