"""Which systems are compared, and what each is started with."""

from dataclasses import dataclass, replace

from benchmarks.peers import PEERS, Options

SYSTEMS = (
    "conserve",
    "elastic",
    "collocated",
    "per_turn",
    "full_disaggregation",
    "ray_serve_llm",
    "ray_pd",
    "vllm",
)
# It gives the rates, and the bounds that others are held to.
FIRST = "conserve"


@dataclass(frozen=True, slots=True)
class Variant:
    """A system as it is measured: its name in reports, the peer, and how that is started."""

    name: str
    peer: str
    options: Options


def names(text: str, *, alone: bool = False) -> list[str]:
    """Names of systems, ConServe's first.

    Args:
        alone: whether they are measured without it, where it is not among them.

    Raises:
        ValueError: there is no such system.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in found if name not in PEERS]:
        raise ValueError(f"systems: no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(found if alone else [FIRST, *found]))


def variants(systems: list[str], wrong_rates: list[float], options: Options) -> list[Variant]:
    """Each system once, ``per_turn`` once for each share of wrong decisions."""
    found = []
    for system in systems:
        if system != "per_turn":
            found.append(Variant(system, system, options))
            continue
        for rate in wrong_rates:
            own = replace(options, wrong_decision_rate=rate)
            found.append(Variant(f"{system}-{100 * rate:g}", system, own))
    return found


def numbers(option: str, text: str) -> list[float]:
    """Numbers from 0, with commas between.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not numbers with commas between") from None
    if not all(number >= 0 for number in found):
        raise ValueError(f"{option}: {text!r} has a number below 0")
    return found
