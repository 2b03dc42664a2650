"""Lists what papers say that came out, beside what came out here."""

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.scale.measure import Figures

_QUICK, _REMOTE, _RECORDED = "quick tools", "remote tools", "recorded"
_SERVING, _OVER_CONTINUUM, _ROLLOUT, _MARS = (1.48, 3.58), (1.17, 3.31), (1.79, 3.92), (1.44, 5.94)
_OURS = ("conserve", "pausing", "parking", "parking, 256 GB")
# What MARS is compared with in its paper, and of what is simulated here.
_MARS_OTHERS = ("vllm", "affinity", "ttl, 2 s", "ttl, 30 s", "attained")


@dataclass(frozen=True, slots=True)
class Claim:
    """One of them.

    Attributes:
        low, high: the published range.
        simulated: for each scene that was simulated.
    """

    source: str
    what: str
    low: float
    high: float
    simulated: dict[str, float]

    @property
    def comes_out(self) -> str:
        """In how many scenes it is at least the lowest published value."""
        met = sum(value >= self.low for value in self.simulated.values())
        return f"{met} of {len(self.simulated)}"


def claims(found: Iterable[Figures]) -> list[Claim]:
    """All of them; what has not been simulated is left out of them."""
    by = {(one.scene, one.load, one.system): one for one in found}
    closed = [scene for scene in (_QUICK, _REMOTE, _RECORDED) if any(key[0] == scene for key in by)]

    def throughput(system: str, over: str, programs: int) -> dict[str, float]:
        return {
            scene: one.steps_per_min / other.steps_per_min
            for scene in closed
            if (one := by.get((scene, programs, system)))
            and (other := by.get((scene, programs, over)))
        }

    def best(scene: str, programs: int) -> float | None:
        rivals = [
            one.steps_per_min
            for (where, load, system), one in by.items()
            if where == scene and load == programs and system not in _OURS
        ]
        return max(rivals, default=None)

    over_vllm, over_affinity = "over vLLM, 96 programs", "over affinity, 144 programs"
    listed = [
        Claim(
            "ThunderAgent, 5.2",
            f"ThunderAgent {over_vllm}",
            *_SERVING,
            throughput("thunderagent", "vllm", 96),
        ),
        Claim(
            "the same",
            f"with f = 1 (its code's default) {over_vllm}",
            *_SERVING,
            throughput("thunderagent, f = 1", "vllm", 96),
        ),
        Claim(
            "the same",
            "ThunderAgent over Continuum, 96 programs",
            *_OVER_CONTINUUM,
            throughput("thunderagent", "ttl, 2 s", 96),
        ),
        Claim(
            "ThunderAgent, table 2",
            f"rollout: ThunderAgent {over_affinity}",
            *_ROLLOUT,
            throughput("thunderagent", "affinity", 144),
        ),
    ]
    for system in _OURS:
        listed += [
            Claim(
                "the same, of ConServe",
                f"{system} {over_vllm}",
                *_SERVING,
                throughput(system, "vllm", 96),
            ),
            Claim(
                "of ConServe",
                f"{system} over the best of the others, 96 programs",
                1.0,
                1.0,
                {
                    scene: by[scene, 96, system].steps_per_min / most
                    for scene in closed
                    if (scene, 96, system) in by and (most := best(scene, 96))
                },
            ),
        ]
    return listed + _of_mars(by)


def _of_mars(by: dict[tuple[str, float, str], Figures]) -> list[Claim]:
    """Programs' mean time: the strongest of MARS's baselines' over the one that is looked at."""
    listed = []
    for system in ("thunderagent, f = 1", *_OURS):
        gains: dict[str, float] = {}
        for scene, rate, name in by:
            own = by[scene, rate, name].program_s
            others = [
                other.program_s
                for baseline in _MARS_OTHERS
                if (other := by.get((scene, rate, baseline))) and other.program_s
            ]
            if name == system and scene.startswith("ILR") and own and others:
                gains[f"{scene} at {rate:g}/s"] = min(others) / own
        if gains:
            what = f"{system}: programs' mean time, the best of MARS's baselines' over its own"
            listed.append(Claim("MARS, 6.3, of others", what, *_MARS, gains))
    return listed
