"""What `/metrics` says."""

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from autoscale.autoscaler import Autoscaler
from conserve.admission import Admission, Pressure, Ticket, Window
from conserve.conversations import ConversationTable
from conserve.events import EventLog
from conserve.pausing import Pausing, ToolReport
from conserve.placement import ConversationPlacement
from conserve.tenants import UsageBook
from conserve.turn import TurnStats
from deployments.table.accounts import Accounts
from deployments.table.engine_metrics import ENERGY, ENGINES, SCHEDULERS
from deployments.table.metrics import APPLICATION, TABLE, Rows
from deployments.table.registry import Registry
from deployments.table.tenant_metrics import NAMED_TENANTS, TENANTS, TenantCounts

# A name without one of these counts things; things that are counted are named in the plural.
UNITS = (
    "_seconds", "_tokens", "_bytes", "_watts", "_joules", "_celsius", "_per_second", "_per_joule",
    "_utilisation",
)  # fmt: skip
COUNTED = (
    "_handoffs", "_deadline", "_prefills", "_failures", "_moves", "_lost", "_conversations",
    "_ended", "_turns", "_refusals", "_length", "_replicas", "_waiting", "_active", "_window",
    "_pressure", "_events",
    "_decodes", "_running", "_kinds", "_begun", "_cut", "_preempted", "_parts", "_blocks", "_slots",
    "_sms", "_pauses", "_restores", "_prefetch", "_refused", "_integrated", "_images",
    "_info", "_up", "_fairness", "_gpus",
)  # fmt: skip


class Scene:
    def __init__(self, window: Window | None = None) -> None:
        self.table = ConversationTable(ConversationPlacement(), 60, pausing=Pausing())
        admission = Admission(self.table, limit=3, timeout_s=60, window=window)
        self.queue = admission.queue
        self.registry = Registry(self.table, 0.0)
        self.autoscaler = Autoscaler({}, {"decoder": 3}, None, window_s=60)
        events = EventLog(lambda: 0.0)
        accounts = Accounts(
            self.table, admission, self.registry, self.autoscaler, events, "a-model"
        )
        self.metrics = accounts.metrics

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
    rows = (*TABLE, *ENGINES, *SCHEDULERS, *ENERGY, *TENANTS, *APPLICATION)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.name.startswith("conserve_")
        assert row.help.endswith(".")
        assert row.name.endswith(UNITS + COUNTED), row.name
    for name in ("conserve_ttft_seconds", "conserve_tbt_seconds", "conserve_queue_wait_seconds"):
        assert families[name].type == "histogram"


def test_the_window_shows_its_pressures() -> None:
    window = Window()
    scene = Scene(window)
    window.observe(0.0, 3, Pressure(kv=0.25, tools=0.5))
    for of, value in (("kv", 0.25), ("cpu", 0.0), ("tools", 0.5)):
        assert scene.value("conserve_admission_pressure", of=of) == value
    scene.table.tools.report("a", ToolReport("bash"), 0.0)
    assert scene.value("conserve_tools_running") == 1


def test_gauges_follow_a_conversation(scene: Scene) -> None:
    table = scene.table
    table.add_decoder("d1", 1000)
    table.add_decoder("d2", 4000)
    table.add_prefiller("p")
    table.bind("a", 300, now_s=1)
    table.bind("b", 500, now_s=1)
    scene.queue.join(Ticket("c", 900, 1.0, 1.0))
    assert scene.value("conserve_conversations", phase="reasoning") == 2
    assert scene.value("conserve_prefiller_queued_tokens", prefiller="p") == 800
    assert scene.value("conserve_decoder_held_tokens", decoder="d1") == 300
    assert scene.value("conserve_working_tokens") == 800
    assert scene.value("conserve_decoder_held_tokens", decoder="d2") == 500
    assert scene.value("conserve_decoder_capacity_tokens", decoder="d2") == 4000
    assert scene.value("conserve_decoder_conversations", decoder="d2") == 1
    assert scene.value("conserve_queue_length") == 1

    a = table.get("a")
    assert a is not None
    table.prefilled(a.newest_turn)
    stats = TurnStats(300, 11, 0, 256)
    table.advance(a.newest_turn, "d1", stats, (), now_s=2)
    scene.queue.leave("c")
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


def test_what_may_happen_is_0_before_it_does(scene: Scene) -> None:
    """Prometheus sees no growth to the first value of a series."""
    for name, labels in (
        ("conversations", {"phase": "reasoning"}),
        ("conversations", {"phase": "acting"}),
        ("queue_length", {}),
        ("handoffs_total", {}),
        ("turns_total", {"outcome": "failed"}),
        ("engines_lost_total", {"role": "decoder"}),
        ("queue_refusals_total", {"reason": "queue_full"}),
        ("queue_refusals_total", {"reason": "timeout"}),
    ):
        assert scene.value(f"conserve_{name}", **labels) == 0, (name, labels)


def samples(rows: Rows[TenantCounts]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in rows.collect()
        for sample in family.samples
    }


def test_metrics_name_so_many_tenants_and_sum_the_others_up() -> None:
    book = UsageBook()
    metrics = TenantCounts(book)
    rows = Rows(TENANTS, metrics)
    assert not list(rows.collect())
    for number in range(NAMED_TENANTS + 5):
        book.tenant(f"t{number}").held_tokens = 10
        metrics.turn(f"t{number}", "completed")
    metrics.refused("t0", "turns")
    metrics.refused(f"t{NAMED_TENANTS + 1}", "turns")
    found = samples(rows)
    assert found["conserve_tenant_turns_total", "t0", "completed"] == 1
    assert found["conserve_tenant_turns_total", "other", "completed"] == 5
    assert found["conserve_tenant_held_tokens", "other"] == 50
    assert found["conserve_tenant_refusals_total", "other", "turns"] == 1
    assert found["conserve_tenant_refusals_total", "t0", "turns"] == 1
    names = {labels[1] for labels in found}
    assert len(names) == NAMED_TENANTS + 1


def test_tokens_are_counted_by_tenant_and_by_where_they_came_from() -> None:
    """What a prefiller has computed for a turn is no cache's merit, though its decoder loads it."""
    counts = TenantCounts(UsageBook())
    rows = Rows(TENANTS[:1], counts)
    counts.begins("acme")
    assert samples(rows)["conserve_tokens_total", "acme", "output"] == 0
    counts.prefilled("acme", 300)
    # Of 500, 100 were in the decoder's cache, and 384 came from LMCache.
    counts.spent("acme", TurnStats(500, 20, 100, 384, prefilled_tokens=300))
    counts.spent(None, TurnStats(50, 5))
    counts.spent("acme", TurnStats(700))  # It was cut before any output.
    assert samples(rows) == {
        ("conserve_tokens_total", "acme", "computed"): 316,
        ("conserve_tokens_total", "acme", "cached"): 184,
        ("conserve_tokens_total", "acme", "output"): 20,
        ("conserve_tokens_total", "", "computed"): 50,
        ("conserve_tokens_total", "", "cached"): 0,
        ("conserve_tokens_total", "", "output"): 5,
    }
