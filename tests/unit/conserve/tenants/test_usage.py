"""A tenant's usage, and how many of its conversations began within a minute."""

from conserve.tenants import UsageBook


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
