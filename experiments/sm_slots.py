"""Measures how fast the ledger of SM slots leases.

One GPU of 132 SMs (steps of 8), four owners that come and go at random. An operation is a lease,
a rebinding, a move of the border between two leases, or a release; one that is refused for want
of room, or since two leases are no neighbours, counts: a caller waits for that as well. Seconds are
of CPU time, which other work on the machine does not lengthen. No Ray: a call to the node's actor
costs more.
"""

import random
import time
from collections.abc import Sequence
from statistics import mean, median

from experiments.harness import Experiment
from hetero.sm_slots import NoFreeSms, SmSlotLedger
from hetero.sm_units import SmSlots, sm_granularity

TARGET_PER_S = 100_000

_OWNERS = ("a", "b", "c", "d")
_GPU = "GPU-0"


def run(operations: int, rng: random.Random) -> tuple[float, float]:
    """Return operations per CPU second of one run, and the share of them that was refused."""
    gpu = SmSlots(132, sm_granularity((9, 0)))
    ledger = SmSlotLedger({_GPU: gpu})
    # Drawn before: the ledger's time is asked for.
    draws = [(rng.random(), rng.choice(_OWNERS), rng.randint(1, 80)) for _ in range(operations)]
    live: list[int] = []
    refused = 0
    started_s = time.process_time()
    for kind, owner, asked in draws:
        try:
            if len(live) < 2 or (kind < 0.25 and len(live) < 8):
                live.append(ledger.lease(_GPU, owner, asked).id)
            elif kind < 0.5:
                ledger.rebind(live[asked % len(live)], asked)
            elif kind < 0.75:
                ledger.split(live[0], live[-1], asked)
            else:
                ledger.release(live.pop(asked % len(live)))
        except (NoFreeSms, ValueError):
            refused += 1
    spent_s = time.process_time() - started_s
    if sum(lease.sms for lease in ledger.leases()) + ledger.free_sms(_GPU) != gpu.sm_count:
        raise RuntimeError("the ledger lost count; this measurement means nothing")
    return operations / spent_s, refused / operations


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("sm_slots", __doc__, rounds=7)
    experiment.option("--operations", 100_000)
    options = experiment.parse(arguments)
    rng = random.Random(0)
    runs = [run(options.operations, rng) for _ in experiment.track(range(options.rounds))]
    rates = [rate for rate, _ in runs]
    middle = median(rates)
    refused = mean(share for _, share in runs)
    verdict = f">= {TARGET_PER_S:,}: {'met' if middle >= TARGET_PER_S else 'missed'}"
    row = [str(len(rates)), *(f"{rate:,.0f}" for rate in (middle, min(rates), max(rates)))]
    columns = ["rounds", "operations per CPU second, median", "slowest", "fastest"]
    columns += ["refused", "target"]
    title = "Ledger of SM slots, one core"
    experiment.show(title, columns, [[*row, f"{refused:.0%}", verdict]], names=0)
    experiment.save([{"per_s": rate, "refused": share} for rate, share in runs])


if __name__ == "__main__":
    main()
