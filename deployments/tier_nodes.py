"""Waits until the cluster has nodes for each role."""

import logging
import time

import ray
from ray.autoscaler.sdk import request_resources

from conserve.settings import Settings, SettingsError
from hetero import tiers
from hetero.gpu_layout import roles, workers
from hetero.gpu_room import short_of_gpus
from hetero.tiers import role_tier

logger = logging.getLogger("ray.serve")

_LOOK_S = 1.0


def wait_for_nodes(settings: Settings, gpu: bool, timeout_s: float) -> None:
    """Return when live nodes, busy or not, offer each role's tier and enough GPUs.

    Raises `SettingsError` with what the cluster has, after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    asked = False
    try:
        while True:
            nodes = tiers.offers(ray.nodes())
            absent = tiers.missing(settings, gpu, nodes)
            if gpu:
                absent += short_of_gpus(settings, nodes)
            if not absent:
                break
            left_s = deadline_s - time.monotonic()
            problems = "\n  ".join(absent)
            there = tiers.inventory(nodes).replace("\n", "\n  ")
            if left_s <= 0:
                raise SettingsError(
                    f"no place for ConServe on this cluster\n  {problems}\nIt has:\n  {there}\n"
                    "Start such a node, or change these settings."
                )
            if not asked:
                asked = True
                logger.warning(
                    "waiting %g s for nodes to join\n  %s\nThe cluster has:\n  %s",
                    timeout_s, problems, there,
                )  # fmt: skip
                # An autoscaler starts nodes only on request, and engines request none yet.
                _ask_autoscaler(settings, gpu)
            time.sleep(min(_LOOK_S, left_s))
    finally:
        if asked:
            # The request holds until withdrawn. Engines' reservations replace it, if they start.
            request_resources(bundles=[])


def _ask_autoscaler(settings: Settings, gpu: bool) -> None:
    bundles, labels = [], []
    for _, own in roles(settings):
        place = role_tier(settings, own, gpu)
        gpus = {"GPU": own.num_gpus} if gpu else {}
        # Without GPUs, one node of each tier has room for all its engines.
        for _ in range(own.replicas * workers(settings, own) if gpu else 1):
            bundles.append({"CPU": 1, **gpus, **place.resources})
            labels.append(dict(place.labels))
    request_resources(bundles=bundles, bundle_label_selectors=labels)
