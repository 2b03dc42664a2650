"""Metrics of the application and of engines, as a scrape has them."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.engines.applications import URL


def exposed(url: str) -> str:
    """The Prometheus text of the application, or of an engine."""
    return httpx.get(url + "/metrics", timeout=30).text


def metric(name: str, text: str | None = None, **labels: str) -> float:
    """The sum of a metric's samples of exactly this name that carry these labels; 0 if none does.

    Args:
        text: what was exposed; None: what the application exposes now.
    """
    return sum(
        (
            sample.value
            for family in text_string_to_metric_families(exposed(URL) if text is None else text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ),
        0.0,
    )
