"""Slot arrays, plans and calls of the sampler for its tests, and a slow and plain sampler of one row."""

import numpy as np
from pagedgen_kernels import reference

from pagedgen.execution.sampler import Sampler
from pagedgen.step import SlotArrays, StepPlan


def make_state(rows, length=8, **settings):
    """Slot arrays whose slot i has the i-th value of each setting; token ids are given as a list for each slot."""
    state = SlotArrays(rows, length, 4)
    for slot, ids in enumerate(settings.pop("token_ids", [])):
        state.token_ids[slot, : len(ids)] = ids
        state.num_tokens[slot] = len(ids)
    for name, values in settings.items():
        getattr(state, name)[:] = values
    return state


def make_plan(slots, biases=None, **asks):
    ones = np.ones(len(slots), np.int32)
    arrays = {
        slot: (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        for slot, bias in (biases or {}).items()
    }
    return StepPlan(slots, ones, ones, ones > 0, np.empty((0, 2), np.int32), biases=arrays, **asks)


def sample(logits, state, slots=None, kernels=reference, **plan):
    """What the sampler gives for the rows of `logits`, which belong to the slots 0, 1, ... or to `slots`."""
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.array(slots, np.int32)
    lengths = state.num_tokens[slots]
    return Sampler(kernels).sample(logits.clone(), slots, lengths, make_plan(slots, **plan), state).result()


def processed(logits, state, slot, bias=None, banned=()):
    """One row of logits after biases, penalties and bans, token by token."""
    scores = logits.float().numpy().copy()
    known = state.token_ids[slot, : state.num_tokens[slot]].tolist()
    completion = known[state.num_prompt[slot] :]
    with np.errstate(all="ignore"):
        for token, value in (bias or {}).items():
            scores[token] += np.float32(value)
        penalty = state.repetition_penalty[slot]
        for token in set(known):
            scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        for token in set(completion):
            often = np.float32(completion.count(token)) * state.frequency_penalty[slot]
            scores[token] -= often + state.presence_penalty[slot]
    scores[list(banned)] = -np.inf
    return scores


def kept(scores, temperature, top_k, top_p, min_p):
    """bool [V]: what the filters leave of a row, and whether top-p's decision is clear of rounding."""
    scaled = scores / np.float32(temperature)
    ordered = np.sort(scaled)[::-1]
    keep = np.ones(len(scaled), bool)
    if 0 < top_k < len(scaled):
        keep &= scaled >= ordered[top_k - 1]
    with np.errstate(all="ignore"):
        mass = np.where(keep, np.exp(scaled.astype(np.float64) - float(ordered[0])), 0)
    clear = True
    if top_p < 1:
        before = np.array([mass[scaled > value].sum() for value in scaled]) / mass.sum()
        clear = not np.any(np.abs(before[keep] - float(top_p)) < 1e-5)
        keep &= before < top_p
    if min_p > 0:
        clear &= not np.any(np.abs(mass[keep] - float(min_p)) < 1e-6)
        keep &= mass >= min_p
    return keep, clear
