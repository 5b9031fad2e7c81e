"""The lengths of prompts and outputs that the published measurements had, as far as their means tell."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# A prompt and its output are truncated at half of it each.
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class LogNormal:
    """Whole numbers from 1 to `most`, log-normal: `sigma` is the deviation of the logarithm, and its mean `mu` is such
    that the mean after rounding and truncation is `mean`."""

    mean: float
    sigma: float
    most: int = MAX_MODEL_LEN // 2

    @cached_property
    def mu(self) -> float:
        low, high = 0.0, math.log(self.most)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_for(middle) < self.mean else (low, middle)
        return low

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Of 1 to `most`."""
        return self._probabilities_for(self.mu)

    def draw(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """One from each of `count` equally likely parts of the distribution, in random order: few of them too have
        about its mean."""
        cumulative = np.cumsum(self.probabilities)
        quantiles = (np.arange(count) + 0.5) / count
        return generator.permutation(np.searchsorted(cumulative, quantiles) + 1)

    def _mean_for(self, mu: float) -> float:
        return float(self._probabilities_for(mu) @ np.arange(1, self.most + 1))

    def _probabilities_for(self, mu: float) -> NDArray[np.float64]:
        cdf = NormalDist(mu, self.sigma).cdf
        found = np.diff([cdf(math.log(edge)) for edge in np.arange(self.most + 1) + 0.5])
        return np.asarray(found / found.sum())


@dataclass(frozen=True)
class Lengths:
    """Tokens of each request. prompts: int64 [rows]. outputs: int64 [rows, samples]."""

    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]

    def scaled(self, divisor: int) -> "Lengths":
        """All lengths divided by it, at least 1."""
        return Lengths(np.maximum(self.prompts // divisor, 1), np.maximum(self.outputs // divisor, 1))


@dataclass(frozen=True)
class Workload:
    name: str
    trace: str
    prompt: LogNormal
    output: LogNormal

    def draw(self, rows: int, samples: int = 1, seed: int = 0) -> Lengths:
        generator = np.random.default_rng(seed)
        prompts = self.prompt.draw(rows, generator)
        return Lengths(prompts, np.stack([self.output.draw(rows, generator) for _ in range(samples)], axis=1))

    def describe(self) -> dict[str, float]:
        return {
            f"{part}_{what}": value
            for part, lengths in (("prompt", self.prompt), ("output", self.output))
            for what, value in (("mean", lengths.mean), ("mu", lengths.mu), ("sigma", lengths.sigma))
        }


# The means are those of Kwon et al., 2023, Fig. 11. The deviations are our choice: a long tail to the right, and chats
# that hold on average about what the published utilisation of `max` comes to.
CHAT = Workload("chat", "ShareGPT", LogNormal(161.0, 1.1), LogNormal(338.0, 0.9))
SHORT = Workload("short instructions", "Alpaca", LogNormal(19.0, 0.5), LogNormal(58.0, 0.9))
