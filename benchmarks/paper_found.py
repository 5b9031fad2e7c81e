"""What was published, and what is found beside it."""

from dataclasses import dataclass, field

from benchmarks.paper_lengths import CHAT, SHORT

WORKLOADS = (CHAT, SHORT)
WIDTHS = (2, 4, 6)
PAGED = "paged"
# Sections 1, 6.2 and 6.3 and Fig. 13 there.
PUBLISHED_USE = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, PAGED: 0.963}
PUBLISHED_SAVED = {
    ("samples", CHAT.name): (0.162, 0.305),
    ("samples", SHORT.name): (0.061, 0.098),
    ("beams", CHAT.name): (0.443, 0.663),
    ("beams", SHORT.name): (0.376, 0.552),
}
PUBLISHED_RUNNING = {
    CHAT.name: {"max": 7.00, "pow2": 9.81, "oracle": 13.62, PAGED: 30.42},
    SHORT.name: {"max": 7.00, "pow2": 43.24, "oracle": 72.75, PAGED: 132.44},
}
PUBLISHED_RATIO = {"max": (2.7, 8.0), "oracle": (1.7, 2.7)}


@dataclass
class Found:
    """All figures. Fractions are 0 to 1; policies are those of RESERVATIONS and `paged`.

    policies: workload -> "packed" or "buddy" -> policy -> figures of a simulated run. use: workload -> policy -> tokens
    held, of what is allocated or reserved on the paged run. saved: "samples" (of one length), "samples apart" (each of
    its own) or "beams" -> workload -> how many -> sharing saved, simulated; beams_real: of real runs. waste: workload
    -> block size -> fraction. real: policy -> figures of each round.
    """

    policies: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)
    use: dict[str, dict[str, float]] = field(default_factory=dict)
    saved: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    beams_real: dict[str, dict[int, float]] = field(default_factory=dict)
    waste: dict[str, dict[int, float]] = field(default_factory=dict)
    real: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def ratio(self, workload: str, space: str, policy: str) -> float:
        """Throughput of paging, over that of a policy, simulated."""
        of = self.policies[workload][space]
        return of[PAGED]["tokens_per_second"] / of[policy]["tokens_per_second"]

    def real_ratios(self, policy: str) -> list[float]:
        """The same of each round of the real runs."""
        paged, others = self.real[PAGED]["tokens_per_second"], self.real[policy]["tokens_per_second"]
        return [a / b for a, b in zip(paged, others, strict=True)]
