"""Nova's evaluation, simulated on one GPU that serves images in three stages, beside the paper.

Nova is `conserve.engine_scheduling.Stages`, the class that engines run. Baselines are the paper's:
prefill first with a threshold, chunked prefill, streams that share all SMs, and static splits.
Times are the paper's and those of the profile `a6000-cogagent`;
`benchmarks/simulate/inside/stage_costs.py` names what else is assumed. All systems serve the same
requests in each seed. Figures are means over seeds, and ratios geometric means.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import fmean, geometric_mean

from rich.box import SIMPLE_HEAD

from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.stage_costs import (
    A6000_COGAGENT,
    COGAGENT_TOWER,
    NOVA_SHARES,
    queueing_s,
    static_shares,
)
from benchmarks.simulate.inside.stages import (
    ChunkedPrefill,
    PrefillFirst,
    Request,
    Server,
    StageServer,
)
from conserve.engine_scheduling import DecodeShare, PrefillLane, Stage, Stages
from experiments.claims import Claim
from experiments.harness import Experiment, at_least_1, group, percentile, pivot

# Section V-A: requests a second, requests of a run, and tokens of an answer.
RATES_PER_S = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
REQUESTS = 500
OUTPUT_TOKENS = (30, 80)

# Table V: encode and prefill, the queue as measured, and by equation 6; by rate, in s.
SERVICE_S = (1.39, 1.44, 1.43, 1.42, 1.38, 1.35)
UTILISATION = (0.42, 0.58, 0.72, 0.86, 0.97, 1.08)
QUEUED_S = (0.60, 1.14, 2.06, 3.82, 8.49, 33.57)
EQUATION_S = (0.51, 1.00, 1.86, 4.32, 20.99, float("inf"))
# Table VI: MB of the encoder, with K of its layers on the GPU, and with all.
TOWER_MB = {2: 692.1, 3: 821.6, 4: 951.1, 5: 1080.7, COGAGENT_TOWER.layers: 8595.2}


def _stages(shares: Mapping[Stage, DecodeShare] | None, loop: Loop) -> Server:
    return StageServer(loop, A6000_COGAGENT, Stages(PrefillLane(), shares))


def _chunked(hidden: float, loop: Loop) -> Server:
    return ChunkedPrefill(loop, A6000_COGAGENT, hidden)


NOVA, PREFILL_FIRST, STREAMS = "nova", "prefill first", "multi-stream"
# How much of a chunk's compute hides behind reading the weights is not published.
CHUNKED, CHUNKED_HALF, CHUNKED_BARE = "chunked", "chunked, half hidden", "chunked, none hidden"
BASELINES = (PREFILL_FIRST, CHUNKED, CHUNKED_HALF, STREAMS)
# The paper does not say which splits it has; S* is what equation 3 finds.
STATIC_SMS = {
    "static 12": (12, 12),
    "static 18": (18, 18),
    "static S*": (24, 30),
    "static 36": (36, 36),
}
SYSTEMS: dict[str, Callable[[Loop], Server]] = {
    NOVA: partial(_stages, NOVA_SHARES),
    PREFILL_FIRST: lambda loop: PrefillFirst(loop, A6000_COGAGENT),
    CHUNKED: partial(_chunked, 1.0),
    CHUNKED_HALF: partial(_chunked, 0.5),
    CHUNKED_BARE: partial(_chunked, 0.0),
    STREAMS: partial(_stages, None),
    **{name: partial(_stages, static_shares(*sms)) for name, sms in STATIC_SMS.items()},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tells what came out of one run; times are means over its requests.

    Attributes:
        longest_s: the longest latency.
        queued_s: before the encode.
        service_s, service_squared_s2: encode and prefill, and the mean of their square.
        tbt_s, tbt_p99_s: between any two tokens of a request.
        batch: requests in a step that decodes.
    """

    system: str
    rate_per_s: float
    seed: int
    latency_s: float
    longest_s: float
    queued_s: float
    service_s: float
    service_squared_s2: float
    ttft_s: float
    tbt_s: float
    tbt_p99_s: float
    batch: float
    throughput_per_s: float


def draw(rate_per_s: float, seed: int) -> list[Request]:
    """Return a run's requests; a seed's differ by the rate only in how fast they come."""
    chance = random.Random(seed)
    came_s = list(accumulate(chance.expovariate(1.0) / rate_per_s for _ in range(REQUESTS)))
    prompt = A6000_COGAGENT.prompt_tokens
    return [
        Request(f"r{number}", prompt, chance.randint(*OUTPUT_TOKENS), came_s=at_s)
        for number, at_s in enumerate(came_s)
    ]


def run(case: tuple[str, float, int]) -> Outcome:
    system, rate_per_s, seed = case
    server = SYSTEMS[system](Loop())
    server.serve(draw(rate_per_s, seed))
    latencies_s = [one.last_token_s - one.came_s for one in server.ended]
    gaps_s = [gap for one in server.ended for gap in one.gaps_s]
    return Outcome(
        system,
        rate_per_s,
        seed,
        latency_s=fmean(latencies_s),
        longest_s=max(latencies_s),
        queued_s=fmean(one.queued_s for one in server.ended),
        service_s=fmean(one.service_s for one in server.ended),
        service_squared_s2=fmean(one.service_s**2 for one in server.ended),
        ttft_s=fmean(one.first_token_s - one.came_s for one in server.ended),
        tbt_s=fmean(gaps_s),
        tbt_p99_s=percentile(gaps_s, 0.99),
        batch=fmean(server.batches),
        throughput_per_s=len(server.ended) / server.loop.now_s,
    )


# --- What the paper claims ------------------------------------------------------------------------

Value = Callable[[Outcome], float]


def ratios(found: Sequence[Outcome], value: Value, over: Sequence[str]) -> dict[str, float]:
    """Return the least of some systems' values over Nova's in the same runs, by rate."""
    by_rate: dict[str, float] = {}
    for rate, ones in group(found, lambda one: one.rate_per_s).items():
        runs = [
            {one.system: value(one) for one in same}
            for same in group(ones, lambda one: one.seed).values()
        ]
        by_rate[f"{rate:g}"] = geometric_mean(
            min(same[name] for name in over) / same[NOVA] for same in runs
        )
    return by_rate


def claims(found: Sequence[Outcome]) -> Iterator[Claim]:
    """Yield the paper's claims, as ratios that are larger the more Nova has of what is claimed."""
    of_three = {
        "best of three": [PREFILL_FIRST, CHUNKED, STREAMS],
        "the same, half hidden": [PREFILL_FIRST, CHUNKED_HALF, STREAMS],
    }
    latencies: tuple[tuple[str, Value, str, float], ...] = (
        # 14.6 % and 23.3 % less.
        ("mean latency", lambda one: one.latency_s, "up to 1.17", 1 / (1 - 0.146)),
        ("longest latency", lambda one: one.longest_s, "up to 1.30", 1 / (1 - 0.233)),
    )
    for what, value, said, reached in latencies:
        for name, over in ({one: [one] for one in BASELINES} | of_three).items():
            yield Claim("V-C", f"{what}, {name} / nova", said, reached, ratios(found, value, over))
    others: tuple[tuple[str, Value, str, float], ...] = (
        ("throughput, nova / {}", lambda one: 1 / one.throughput_per_s, "no smaller", 0.995),
        ("decode batch, {} / nova", lambda one: one.batch, "above 1", 1.0),
        ("mean TBT, {} / nova", lambda one: one.tbt_s, "above 1", 1.0),
    )
    for what, value, said, reached in others:
        for name in BASELINES:
            yield Claim("V-C", what.format(name), said, reached, ratios(found, value, [name]))
    ttft = ratios(found, lambda one: 1 / one.ttft_s, [STREAMS])
    yield Claim("V-C", f"mean TTFT, nova / {STREAMS}", "above 1", 1.0, ttft)
    for name in STATIC_SMS:
        gains = ratios(found, lambda one: one.latency_s, [name])
        yield Claim("V-E", f"mean latency, {name} / nova", "above 1", 1.0, gains)


# --- Tables ---------------------------------------------------------------------------------------


def show_queue(found: Sequence[Outcome], experiment: Experiment) -> None:
    by_rate = group((one for one in found if one.system == NOVA), lambda one: one.rate_per_s)
    rows = [
        ["encode and prefill, s"],
        ["utilisation"],
        ["queue, s"],
        ["  least to most of a seed"],
        ["queue by equation 6, s"],
    ]
    for number, (rate, ones) in enumerate(by_rate.items()):
        service_s = fmean(one.service_s for one in ones)
        equation_s = queueing_s(rate, service_s, fmean(one.service_squared_s2 for one in ones))
        queued_s = [one.queued_s for one in ones]
        column = (
            f"{SERVICE_S[number]:.2f} / {service_s:.2f}",
            f"{UTILISATION[number]:.2f} / {rate * service_s:.2f}",
            f"{QUEUED_S[number]:.2f} / {fmean(queued_s):.2f}",
            f"{min(queued_s):.2f} to {max(queued_s):.2f}",
            f"{EQUATION_S[number]:.2f} / {equation_s:.2f}",
        )
        for row, cell in zip(rows, column, strict=True):
            row.append(cell)
    columns = ["", *(f"{rate:g}/s" for rate in by_rate)]
    experiment.show("Table V: published / simulated", columns, rows, box=SIMPLE_HEAD)


def show_systems(
    found: Sequence[Outcome],
    title: str,
    values: Sequence[tuple[Value, str]],
    experiment: Experiment,
) -> None:
    """Print values of each system by rate; each has the format that follows it."""
    columns, rows = pivot(
        found,
        lambda one: (one.system,),
        lambda one: f"{one.rate_per_s:g}/s",
        lambda ones: " / ".join(f"{fmean(map(value, ones)):{form}}" for value, form in values),
    )
    experiment.show(title, ["", *columns], rows, box=SIMPLE_HEAD)


def show_claims(found: Sequence[Outcome], experiment: Experiment) -> None:
    """Print the ratio of each claim at each rate."""
    rows = [
        (
            one.source,
            one.what,
            one.published,
            *(f"{value:.2f}" for value in one.values),
            one.comes_out,
        )
        for one in claims(found)
    ]
    rates = [f"{rate:g}/s" for rate in RATES_PER_S]
    columns = ("section", "claim", "published", *rates, "comes out")
    experiment.show("Claims, and what came out", columns, rows, names=3, box=SIMPLE_HEAD)


def show_tower(experiment: Experiment) -> None:
    rows = [
        (
            f"{kept} of {COGAGENT_TOWER.layers}",
            f"{published:,.1f}",
            f"{COGAGENT_TOWER.kept_bytes(kept) / 2**20:,.1f}",
        )
        for kept, published in TOWER_MB.items()
    ]
    columns = ("layers on the GPU", "published", "by the model's sizes")
    experiment.show("Table VI: MiB of the encoder", columns, rows, box=SIMPLE_HEAD)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("nova", __doc__, width=130)
    experiment.option("--seeds", 20, "how many", type=at_least_1, metavar="N")
    options = experiment.parse(arguments)
    cases = [
        (system, rate, seed)
        for rate in RATES_PER_S
        for seed in range(options.seeds)
        for system in SYSTEMS
    ]
    found = experiment.on_all_cores(run, cases)
    show_queue(found, experiment)
    shown: tuple[tuple[str, Sequence[tuple[Value, str]]], ...] = (
        (
            "latency, mean / longest, s",
            ((lambda one: one.latency_s, ".2f"), (lambda one: one.longest_s, ".1f")),
        ),
        (
            "TTFT, mean, s / TBT, mean, ms / p99, ms",
            (
                (lambda one: one.ttft_s, ".2f"),
                (lambda one: 1e3 * one.tbt_s, ".0f"),
                (lambda one: 1e3 * one.tbt_p99_s, ".0f"),
            ),
        ),
        (
            "requests/s / mean batch of a step that decodes",
            ((lambda one: one.throughput_per_s, ".3f"), (lambda one: one.batch, ".2f")),
        ),
    )
    for title, values in shown:
        show_systems(found, title, values, experiment)
    show_claims(found, experiment)
    show_tower(experiment)
    experiment.save(found)


if __name__ == "__main__":
    main()
