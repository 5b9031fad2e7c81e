"""Random logits for the launchers of the sampler, and the calls that they are for; see `gpu_kernel_work`."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from benchmarks.gpu_kernel_work import Tensor, Work, random

ROWS = 48
NAN_ROW, NOTHING_ROW = 5, 9


@dataclass(frozen=True)
class Logits:
    """logits: [ROWS, vocab_size], of a peaked distribution as a model's, one row with a NaN and one of -inf alone.
    keys: int64 [ROWS]. temperature, top_p, min_p: float32 [ROWS]; top_k: int64 [ROWS]; some are off."""

    logits: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @property
    def filters(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p


def make_logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Logits:
    logits = 4 * random(ROWS, vocab_size, dtype=dtype, device=device)
    logits[NAN_ROW, vocab_size // 2] = torch.nan
    logits[NOTHING_ROW] = -torch.inf
    logits[11, vocab_size // 3 :] = -torch.inf
    logits[12] = 0.0
    row = torch.arange(ROWS, device=device)
    keys = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=torch.Generator().manual_seed(2)).to(device)
    return Logits(
        logits,
        keys,
        temperature=0.5 + (row % 7) / 4,
        top_k=torch.where(row % 3 == 0, 0, row),
        top_p=torch.where(row % 4 == 0, 1.0, 0.5 + (row % 10) / 20).float(),
        min_p=torch.where(row % 5 == 0, 0.02, 0.0).float(),
    )


def greedy_argmax(x: Logits) -> Work:
    rows = torch.tensor([3, 0, NAN_ROW, 11], device=x.logits.device)
    return lambda kernels: (kernels.greedy_argmax(x.logits), kernels.greedy_argmax(x.logits, rows))


def gumbel_argmax(x: Logits) -> Work:
    return lambda kernels: (kernels.gumbel_argmax(x.logits, x.temperature, x.keys),)


def lowest_kept(x: Logits) -> Work:
    """How many tokens each usable row keeps: bounds that keep the same ones are as good as each other."""
    usable = torch.tensor([r for r in range(ROWS) if r not in (NAN_ROW, NOTHING_ROW)], device=x.logits.device)
    settings = tuple(setting[usable] for setting in x.filters)
    logits = x.logits[usable].float()
    scaled = logits / settings[0][:, None]

    def work(kernels: ModuleType) -> tuple[Tensor, ...]:
        lowest = kernels.lowest_kept(x.logits, *settings, usable)
        return (((scaled >= lowest[:, None]) & (logits > -torch.inf)).sum(1),)

    return work


def choose_tokens(x: Logits) -> Work:
    greedy = torch.arange(ROWS, device=x.logits.device) % 6 == 1
    temperature = torch.where(greedy, 0.0, x.temperature)
    return lambda kernels: (kernels.choose_tokens(x.logits, temperature, *x.filters[1:], x.keys),)


def top_tokens(x: Logits) -> Work:
    """Values and ids of the row with the NaN mean nothing."""

    def work(kernels: ModuleType) -> tuple[Tensor, ...]:
        values, ids, total = kernels.top_tokens(x.logits, x.temperature, 20)
        values[NAN_ROW], ids[NAN_ROW] = 0.0, 0
        return values, ids, total

    return work


def gumbel_noise(x: Logits) -> Work:
    vocab_size = x.logits.shape[1]
    ids = torch.randint(0, vocab_size, (ROWS, 300), generator=torch.Generator().manual_seed(3)).to(x.keys.device)
    return lambda kernels: (kernels.gumbel_noise(x.keys, ids),)


def penalise(x: Logits) -> Work:
    """Always in float32. The sequences lie in no order."""
    vocab_size, device = x.logits.shape[1], x.logits.device
    generator = torch.Generator().manual_seed(4)
    token_ids = torch.randint(0, min(vocab_size, 400), (ROWS + 2, 600), generator=generator).to(device, torch.int32)
    rows = torch.randperm(ROWS + 2, generator=generator)[:ROWS].to(device)
    lengths = torch.randint(1, 600, (ROWS,), generator=generator).to(device)
    row = torch.arange(ROWS, device=device)
    repetition = torch.where(row % 3 == 0, 1.0, 1.3).float()
    presence, frequency = (torch.where(row % n == 0, 0.0, 0.4).float() for n in (2, 5))
    settings = (token_ids, lengths, lengths // 2, repetition, presence, frequency, rows)

    def work(kernels: ModuleType) -> tuple[Tensor, ...]:
        scores = torch.nan_to_num(x.logits.float())
        kernels.penalise(scores, *settings)
        return (scores,)

    return work


SAMPLER: dict[str, Callable[[Logits], Work]] = {
    "greedy_argmax": greedy_argmax,
    "gumbel_argmax": gumbel_argmax,
    "lowest_kept": lowest_kept,
    "choose_tokens": choose_tokens,
    "top_tokens": top_tokens,
    "gumbel_noise": gumbel_noise,
    "penalise": penalise,
}
