"""The published claims of Kwon et al., 2023 (PagedAttention), with the scheduler and the block manager of this project.

Simulated at the published scale (OPT-13B, 12 GiB of keys and values): how much of the KV memory holds tokens, how many
sequences run at a time and how fast, for contiguous reservations and for paging; what samples and beams share; and what
is wasted as blocks grow. Really run with the default model, unless `--quick`: what beams share, and the throughput for
each way to reserve in a pool of the same number of bytes.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common import RESULTS, write_results
from benchmarks.paper_figure import draw
from benchmarks.paper_found import (
    PAGED,
    PUBLISHED_RATIO,
    PUBLISHED_RUNNING,
    PUBLISHED_SAVED,
    PUBLISHED_USE,
    WIDTHS,
    WORKLOADS,
    Found,
)
from benchmarks.paper_lengths import CHAT, SHORT, Lengths, Workload
from benchmarks.paper_reserve import BUDDY_RESERVATIONS, RESERVATIONS, BuddySpace, PackedSpace, Reserve, Space
from benchmarks.paper_simulate import Measured, Setting, simulate

ROWS = {CHAT.name: 1000, SHORT.name: 3000}
BEAM_ROWS = {CHAT.name: 6, SHORT.name: 16}
BLOCK_SIZES = tuple(1 << power for power in range(9))


def beam_lengths(workload: Workload) -> Lengths:
    return workload.draw(BEAM_ROWS[workload.name])


def simulate_policies(workload: Workload, found: Found) -> None:
    lengths, setting = workload.draw(ROWS[workload.name]), Setting()
    paged = simulate(lengths, setting)
    found.use[workload.name] = {name: paged.mean(name) for name in (*RESERVATIONS, PAGED)}
    ways: dict[str, tuple[dict[str, Reserve], type[PackedSpace] | type[BuddySpace]]] = {
        "packed": (RESERVATIONS, PackedSpace),
        "buddy": (BUDDY_RESERVATIONS, BuddySpace),
    }
    of_workload = found.policies[workload.name] = {}
    for way, (reservations, space_type) in ways.items():
        of_way = of_workload[way] = {}
        for name, reserve in reservations.items():
            space: Space = space_type(setting.kv_tokens)
            of_way[name] = figures(simulate(lengths, setting, reserve, space))
        of_way[PAGED] = figures(paged)


def figures(measured: Measured) -> dict[str, float]:
    return {
        "tokens_per_second": measured.tokens_per_second,
        "running": measured.mean("running"),
        "pool": measured.mean("pool"),
        "preemptions": measured.preemptions,
    }


def simulate_sharing(workload: Workload, found: Found) -> None:
    samples, beams = (found.saved.setdefault(kind, {}).setdefault(workload.name, {}) for kind in ("samples", "beams"))
    apart = found.saved.setdefault("samples apart", {}).setdefault(workload.name, {})
    for count in WIDTHS:
        lengths = workload.draw(ROWS[workload.name] // 4, samples=count)
        apart[count] = simulate(lengths, Setting(n=count)).mean("saved")
        alike = Lengths(lengths.prompts, np.repeat(lengths.outputs[:, :1], count, axis=1))
        samples[count] = simulate(alike, Setting(n=count)).mean("saved")
        beams[count] = simulate(beam_lengths(workload), Setting(width=count), whole=True).mean("saved")


def simulate_waste(workload: Workload, found: Found) -> None:
    lengths = workload.draw(ROWS[workload.name])
    found.waste[workload.name] = {
        size: 1 - simulate(lengths, Setting(block_size=size)).mean(PAGED) for size in BLOCK_SIZES
    }


@dataclass(frozen=True)
class Claim:
    """A row of the table. why: why ours differs from what was published, or what it means."""

    claim: str
    published: str
    ours: str
    why: str


def percent(*values: float) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in values) + "%"


def span(least: float, most: float) -> str:
    return f"{100 * least:.1f}-{100 * most:.1f}%"


def claims_on_memory(found: Found) -> list[Claim]:
    chat, short = CHAT.name, SHORT.name
    buddy = found.policies[chat]["buddy"]
    best = max(size for size, waste in found.waste[short].items() if waste <= 0.04)
    return [
        Claim(
            "tokens held, of the KV memory: max / pow2 / oracle, chat",
            percent(*(PUBLISHED_USE[name] for name in RESERVATIONS)),
            percent(*(buddy[name]["pool"] for name in RESERVATIONS)),
            "with a buddy allocator, as there; the lengths' spread is our guess",
        ),
        Claim(
            "tokens held, of what is reserved: max / pow2 / oracle, chat",
            "-",
            percent(*(found.use[chat][name] for name in RESERVATIONS)),
            "reservations side by side with no gaps, which is kinder to them than any allocator",
        ),
        Claim(
            "tokens held, of the blocks allocated: paged, chat",
            percent(PUBLISHED_USE[PAGED]),
            percent(found.use[chat][PAGED]),
            "half a block a sequence is lost, whatever its length; of the whole pool, "
            f"{percent(buddy[PAGED]['pool'])} hold tokens",
        ),
        Claim(
            "the same, short instructions",
            "-",
            percent(found.use[short][PAGED]),
            f"half a block weighs more in a short sequence; blocks of {best} lose {percent(found.waste[short][best])}",
        ),
        Claim(
            "waste by block size 8 / 16 / 32 / 64, chat",
            "-",
            percent(*(found.waste[chat][size] for size in (8, 16, 32, 64))),
            "it doubles with the block",
        ),
        Claim(
            "waste by block size 8 / 16 / 32 / 64, short instructions",
            "-",
            percent(*(found.waste[short][size] for size in (8, 16, 32, 64))),
            "a block of 64 holds most of such a sequence",
        ),
    ]


def claims_on_sharing(found: Found) -> list[Claim]:
    claims = []
    for (kind, workload), published in PUBLISHED_SAVED.items():
        ours = simulated = percent(*found.saved[kind][workload].values())
        if kind == "samples":
            apart = percent(*found.saved["samples apart"][workload].values())
            why = f"simulated, all samples of a prompt of one length; each of its own: {apart}"
        elif found.beams_real:
            ours = percent(*found.beams_real[workload].values())
            why = f"real beams, of another model on few prompts; simulated ones: {simulated}"
        else:
            why = "simulated; beams part sooner or later from model to model"
        claims.append(Claim(f"sharing saved, 2 / 4 / 6 {kind}, {workload}", span(*published), ours, why))
    return claims


def claims_on_speed(found: Found) -> list[Claim]:
    claims = []
    for workload in WORKLOADS:
        published, buddy = PUBLISHED_RUNNING[workload.name], found.policies[workload.name]["buddy"]
        claims.append(
            Claim(
                f"sequences at a time, {workload.name}: max / pow2 / oracle / paged",
                " / ".join(f"{value:.1f}" for value in published.values()),
                " / ".join(f"{buddy[name]['running']:.1f}" for name in published),
                "theirs at a rate of requests, ours with requests always waiting",
            )
        )
    for policy, (least, most) in PUBLISHED_RATIO.items():
        ratios = [found.ratio(CHAT.name, way, policy) for way in ("buddy", "packed")]
        claims.append(
            Claim(
                f"throughput, paged over {policy}, chat, simulated: buddy / packed",
                f"{least}-{most}x",
                " / ".join(f"{ratio:.2f}" for ratio in ratios) + "x",
                "theirs is the rate of requests at a like latency, with a buddy allocator; ours that of tokens",
            )
        )
    for policy in RESERVATIONS if found.real else ():
        ratios = found.real_ratios(policy)
        published_ratio = PUBLISHED_RATIO.get(policy)
        claims.append(
            Claim(
                f"the same over {policy}, packed, real run on this machine",
                f"{published_ratio[0]}-{published_ratio[1]}x" if published_ratio else "-",
                f"{statistics.median(ratios):.2f}x",
                f"{min(ratios):.2f}-{max(ratios):.2f} in {len(ratios)} rounds; no gaps between reservations, and where "
                "arithmetic binds a larger batch gains less",
            )
        )
    return claims


def print_claims(claims: Sequence[Claim]) -> None:
    rows = [("claim", "published", "ours", "why"), *((c.claim, c.published, c.ours, c.why) for c in claims)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print()
    for claim, published, ours, why in rows:
        print(f"{claim:<{widths[0]}}  {published:>{widths[1]}}  {ours:>{widths[2]}}  {why}")


def report(found: Found) -> None:
    """Print the table, and write it with all figures and a picture."""
    claims = claims_on_memory(found) + claims_on_sharing(found) + claims_on_speed(found)
    print_claims(claims)
    write_results(
        "paper",
        {
            "lengths": {workload.name: workload.describe() for workload in WORKLOADS},
            "claims": [vars(claim) for claim in claims],
            "found": vars(found),
        },
    )
    for suffix in ("png", "svg"):
        draw(found, RESULTS / f"paper.{suffix}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what is really run")
    parser.add_argument("--rounds", type=int, default=3, help="of the real throughput runs")
    arguments = parser.parse_args()
    found = Found()
    for workload in WORKLOADS:
        for part in (simulate_policies, simulate_sharing, simulate_waste):
            part(workload, found)
        print(f"{workload.name}: simulated", flush=True)
    if not arguments.quick:
        from benchmarks import paper_real

        found.beams_real = paper_real.beam_sharing({w.name: beam_lengths(w) for w in WORKLOADS}, WIDTHS)
        found.real = paper_real.throughput(arguments.rounds)
    report(found)


if __name__ == "__main__":
    main()
