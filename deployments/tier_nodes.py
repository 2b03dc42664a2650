"""Whether the cluster has a place for each role, before anything waits for one in vain."""

import logging
import time

import ray
from ray.autoscaler.sdk import request_resources

from conserve.settings import Settings, SettingsError
from hetero import tiers
from hetero.tiers import role_tier

logger = logging.getLogger("ray.serve")

_LOOK_S = 1.0


def wait_for_tiers(settings: Settings, gpu: bool, timeout_s: float) -> None:
    """Return when each role's tier is offered by a node that is alive, busy or not.

    Raises:
        SettingsError: one is not, after so long; says what the cluster has.
    """
    deadline_s = time.monotonic() + timeout_s
    asked = False
    try:
        while True:
            nodes = tiers.offers(ray.nodes())
            absent = tiers.missing(settings, gpu, nodes)
            if not absent:
                break
            left_s = deadline_s - time.monotonic()
            problems = "\n  ".join(absent)
            there = tiers.inventory(nodes).replace("\n", "\n  ")
            if left_s <= 0:
                raise SettingsError(
                    f"no place for ConServe on this cluster\n  {problems}\nIt has:\n  {there}\n"
                    "Start such a node, or name another tier."
                )
            if not asked:
                asked = True
                logger.warning(
                    "waiting %g s for nodes to join\n  %s\nThe cluster has:\n  %s",
                    timeout_s, problems, there,
                )  # fmt: skip
                # An autoscaler starts nodes for what is asked of it, and nothing is, yet.
                _ask_autoscaler(settings, gpu)
            time.sleep(min(_LOOK_S, left_s))
    finally:
        if asked:
            # It would stand until it is withdrawn. From now on the engines' own reservations
            # speak; or nobody wants these nodes any more.
            request_resources(bundles=[])


def _ask_autoscaler(settings: Settings, gpu: bool) -> None:
    wanted = [settings.decoders] + ([settings.prefillers] if settings.prefiller_replicas else [])
    places = [role_tier(settings, own, gpu) for own in wanted]
    request_resources(
        bundles=[{"CPU": 1, **({"GPU": 1} if gpu else {}), **place.resources} for place in places],
        bundle_label_selectors=[dict(place.labels) for place in places],
    )
