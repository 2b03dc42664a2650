"""The metrics of those who wait."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conserve.admission.admission import WHYS, Admission


class LineMetrics(Collector):
    """The line, by why each waits.

    Args:
        clock: whose readings the line was told.
    """

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        now_s = self._clock()
        waiting = GaugeMetricFamily(
            "conserve_waiting",
            "Conversations in line, by why: no decoder has room, as many are at work as the window "
            "lets, or others go before.",
            labels=["why"],
        )
        counts = Counter(why for _, why in self._admission.waiting(now_s))
        for why in WHYS:
            waiting.add_metric([why], counts[why])
        yield waiting
        window = self._admission.window
        if window is not None:
            yield GaugeMetricFamily(
                "conserve_admission_window",
                "How many histories may be at work; +Inf: as many as there is room for.",
                value=window.limit,
            )
        yield GaugeMetricFamily(
            "conserve_active",
            "Histories at work: a turn runs, or ended a moment ago.",
            value=self._admission.active(now_s),
        )
