"""What `/metrics` says."""

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from conserve.admission.waiting import WaitingLine
from conserve.conversations import ConversationTable
from conserve.history import TurnStats
from conserve.metrics import Metrics, ReplicaCounts
from conserve.placement import ConversationPlacement

# A name without one of these counts things; things that are counted are named in the plural.
UNITS = ("_seconds", "_tokens", "_bytes")
COUNTED = (
    "_handoffs", "_prefills", "_failures", "_moves", "_lost", "_conversations", "_ended",
    "_turns", "_refusals", "_length", "_replicas",
)  # fmt: skip


class Scene:
    def __init__(self) -> None:
        self.table = ConversationTable(ConversationPlacement(), idle_timeout_s=60)
        self.line = WaitingLine(limit=3, timeout_s=60)
        self.replicas = {"decoder": ReplicaCounts(2, 1, 3)}
        self.metrics = Metrics(self.table, self.line, lambda: self.replicas)

    def families(self) -> dict[str, Metric]:
        text = self.metrics.render().decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, sample_name: str, **labels: str) -> float | None:
        for family in self.families().values():
            for sample in family.samples:
                if sample.name == sample_name and sample.labels == labels:
                    return sample.value
        return None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_every_family_is_explained_and_named_for_its_unit(scene: Scene) -> None:
    scene.table.add_decoder("d", 1000)
    scene.table.add_prefiller("p")
    families = scene.families()
    assert len(families) > 15
    for name, family in families.items():
        if name.endswith("_created"):  # the client library's own, one a counter
            continue
        assert name.startswith("conserve_")
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert name.endswith(UNITS + COUNTED), name
    for name in ("conserve_ttft_seconds", "conserve_tbt_seconds", "conserve_queue_wait_seconds"):
        assert families[name].type == "histogram"


def test_an_empty_table_says_zero_and_not_nothing(scene: Scene) -> None:
    assert scene.value("conserve_conversations", phase="reasoning") == 0
    assert scene.value("conserve_conversations", phase="acting") == 0
    assert scene.value("conserve_queue_length") == 0
    assert scene.value("conserve_handoffs_total") == 0


def test_gauges_follow_a_conversation(scene: Scene) -> None:
    table = scene.table
    table.add_decoder("d1", 1000)
    table.add_decoder("d2", 4000)
    table.add_prefiller("p")
    table.bind("a", 300, now_s=1)
    table.bind("b", 500, now_s=1)
    scene.line.join("c", 900, now_s=1)
    assert scene.value("conserve_conversations", phase="reasoning") == 2
    assert scene.value("conserve_prefiller_queued_tokens", prefiller="p") == 800
    assert scene.value("conserve_decoder_held_tokens", decoder="d1") == 300
    assert scene.value("conserve_decoder_held_tokens", decoder="d2") == 500
    assert scene.value("conserve_decoder_capacity_tokens", decoder="d2") == 4000
    assert scene.value("conserve_decoder_conversations", decoder="d2") == 1
    assert scene.value("conserve_queue_length") == 1

    a = table.get("a")
    assert a is not None
    table.prefilled(a.newest_turn)
    stats = TurnStats(300, 11, 0, 256)
    table.advance(a.newest_turn, "d1", stats, (), now_s=2)
    scene.line.leave("c")
    assert scene.value("conserve_conversations", phase="reasoning") == 1
    assert scene.value("conserve_conversations", phase="acting") == 1
    assert scene.value("conserve_prefiller_queued_tokens", prefiller="p") == 500
    assert scene.value("conserve_decoder_held_tokens", decoder="d1") == 311
    assert scene.value("conserve_queue_length") == 0

    table.release("a")
    table.release("b")
    assert scene.value("conserve_conversations", phase="reasoning") == 0
    assert scene.value("conserve_conversations", phase="acting") == 0
    assert scene.value("conserve_decoder_held_tokens", decoder="d1") == 0
    assert scene.value("conserve_decoder_held_tokens", decoder="d2") == 0


def test_lost_engines_disappear(scene: Scene) -> None:
    scene.table.add_decoder("d", 1000)
    scene.table.add_prefiller("p")
    scene.table.bind("a", 300, now_s=1)
    scene.table.remove_decoder("d")
    scene.table.remove_prefiller("p")
    assert scene.value("conserve_decoder_held_tokens", decoder="d") is None
    assert scene.value("conserve_prefiller_queued_tokens", prefiller="p") is None
    # The conversation itself lives on.
    assert scene.value("conserve_conversations", phase="acting") == 1


def test_counters_and_histograms(scene: Scene) -> None:
    metrics = scene.metrics
    metrics.handoffs.inc()
    metrics.handoff_tokens.inc(256)
    metrics.turns.labels("completed").inc()
    metrics.turns.labels("failed").inc(2)
    metrics.engines_lost.labels("decoder").inc()
    metrics.ended.labels("idle").inc()
    metrics.refusals.labels("queue_full").inc()
    metrics.ttft_s.observe(0.3)
    metrics.tbt_s.observe(0.004)
    assert scene.value("conserve_handoffs_total") == 1
    assert scene.value("conserve_handoff_tokens_total") == 256
    assert scene.value("conserve_turns_total", outcome="completed") == 1
    assert scene.value("conserve_turns_total", outcome="failed") == 2
    assert scene.value("conserve_engines_lost_total", role="decoder") == 1
    assert scene.value("conserve_conversations_ended_total", reason="idle") == 1
    assert scene.value("conserve_queue_refusals_total", reason="queue_full") == 1
    assert scene.value("conserve_ttft_seconds_sum") == pytest.approx(0.3)
    assert scene.value("conserve_ttft_seconds_bucket", le="0.25") == 0
    assert scene.value("conserve_ttft_seconds_bucket", le="0.5") == 1
    assert scene.value("conserve_tbt_seconds_bucket", le="0.005") == 1


def test_two_applications_in_one_process_do_not_mix() -> None:
    one, other = Scene(), Scene()
    one.metrics.handoffs.inc()
    assert other.value("conserve_handoffs_total") == 0


def test_odd_engine_ids_survive_the_text_format(scene: Scene) -> None:
    odd = 'default#Decoder#a"b\\c'
    scene.table.add_decoder(odd, 10)
    assert scene.value("conserve_decoder_capacity_tokens", decoder=odd) == 10


def test_replicas_are_told_with_the_signal_that_decides(scene: Scene) -> None:
    assert scene.value("conserve_replicas", role="decoder") == 2
    assert scene.value("conserve_leaving_replicas", role="decoder") == 1
    assert scene.value("conserve_wanted_replicas", role="decoder") == 3
    assert "conserve_needed_replicas" in scene.families()
    scene.replicas = {"decoder": ReplicaCounts(2, 1, 3, 2.4, "occupancy")}
    assert scene.value("conserve_needed_replicas", role="decoder", signal="occupancy") == 2.4
