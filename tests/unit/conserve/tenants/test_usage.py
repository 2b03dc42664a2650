"""A tenant's usage, and how many of its conversations began within a minute."""

from conserve.tenants import UsageBook
from conserve.tenants.metrics import NAMED_AT_MOST, TenantMetrics


def test_conversations_count_as_new_for_a_minute() -> None:
    usage = UsageBook().tenant("a")
    for at_s in (100.0, 100.9, 130.0):
        usage.began(at_s)
    assert usage.begun_lately(159.9) == 3
    assert usage.fewer_in_s(130.0) == 30
    assert usage.begun_lately(160.0) == 1
    assert usage.fewer_in_s(189.9) == 1
    assert usage.begun_lately(190.0) == 0
    # One that began long ago, under a table that was lost, comes after newer ones.
    usage.began(500.0)
    usage.began(20.0)
    assert usage.begun_lately(500.0) == 1
    # One from a decoder whose clock is an hour ahead does not block for an hour.
    usage.began(4100.0)
    assert usage.begun_lately(500.0) == 1


def test_what_is_kept_of_it_is_bounded() -> None:
    usage = UsageBook().tenant("a")
    for second in range(10_000):
        usage.began(float(second))
    assert len(usage._began) < 200


def test_a_conversation_is_of_the_tenant_that_its_id_names() -> None:
    book = UsageBook()
    book.of("a\tx").turns = 1
    book.of("x").turns = 5
    assert book.tenant("a").turns == 1
    assert list(book.tenants()) == ["a"]


def _samples(metrics: TenantMetrics) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_metrics_name_so_many_tenants_and_sum_the_others_up() -> None:
    book = UsageBook()
    metrics = TenantMetrics(book)
    assert not list(metrics.collect())
    for number in range(NAMED_AT_MOST + 5):
        book.tenant(f"t{number}").held_tokens = 10
        metrics.turn(f"t{number}", "completed")
    metrics.refused("t0", "turns")
    metrics.refused(f"t{NAMED_AT_MOST + 1}", "turns")
    found = _samples(metrics)
    assert found["conserve_tenant_turns_total", "t0", "completed"] == 1
    assert found["conserve_tenant_turns_total", "other", "completed"] == 5
    assert found["conserve_tenant_held_tokens", "other"] == 50
    assert found["conserve_tenant_refusals_total", "other", "turns"] == 1
    assert found["conserve_tenant_refusals_total", "t0", "turns"] == 1
    names = {labels[1] for labels in found}
    assert len(names) == NAMED_AT_MOST + 1
