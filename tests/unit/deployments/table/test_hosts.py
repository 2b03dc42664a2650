"""The table's actor where prefillers host conversations, and what engines say of their work."""

from typing import Any

from autoscale.autoscaler import Scaling, Wanted
from conserve.history import History
from conserve.placement.load import EngineLoad
from deployments.answers import Alive
from deployments.messages import EngineInfo
from hetero.energy import EngineEnergy
from tests.unit.deployments.table.drive import Drive, engine


def host(name: str = "p", **changes: Any) -> EngineInfo:
    return engine(name, "prefiller", also_hosts=True, **changes)


async def a_service(*decoders: str) -> Drive:
    """A prefiller that hosts, and decoders."""
    service = await Drive.of(host(), *map(engine, decoders), placement="elastic")
    # No other engine is waited for.
    service._recovery.complete.set()
    return service


async def test_a_prefiller_that_hosts_serves_where_there_is_no_other() -> None:
    service = await a_service()
    plan = await service.turn("c")
    # What it computes for itself goes through nobody's memory.
    assert (plan.decoder_id, plan.prefiller_id) == ("p", None)
    assert (await service.shown_engine("p"))["held_tokens"] == 100
    await service.ends(plan)
    assert (await service.turn("c", ends=True)).decoder_id == "p"
    view = await service.shown_engine("p")
    assert (view["role"], view["hosts"]) == ("prefiller", True)
    assert (view["conversations"], view["held_tokens"], view["queued_tokens"]) == (1, 110, 0)
    assert await service.says('conserve_decoder_conversations{decoder="p"} 1.0')
    # Of its KV space is known what it is used for.
    assert b'conserve_cost_token_seconds_total{decoder="p"' in await service.metrics()


async def test_it_counts_once_as_a_prefiller() -> None:
    service = await a_service("d")
    assert await service.health() == Alive(1, 1)
    assert await service.says('conserve_replicas{role="prefiller"} 1.0')
    assert await service.says('conserve_replicas{role="decoder"} 1.0')
    await service.beat("p", EngineEnergy(10, "e"))
    await service.beat("p", EngineEnergy(30, "e"))
    assert b'role="prefiller"' in await service.metrics()
    await service.engine_lost("p", "it died")
    assert await service.health() == Alive(0, 1)
    assert await service.says('conserve_engines_lost_total{role="prefiller"} 1.0')


async def test_a_plain_prefiller_hosts_nothing() -> None:
    service = await Drive.of(engine("p", "prefiller"), engine("d"))
    view = await service.shown_engine("p")
    assert (view["hosts"], view["conversations"], view["held_tokens"]) == (False, None, None)
    assert (await service.shown_engine("d"))["hosts"]


async def test_what_a_lost_one_had_goes_on_elsewhere_and_its_queue_is_gone() -> None:
    service = await a_service()
    await service.turn("c", ends=True)
    await service.register(engine("d"))
    # A prompt that it computes for the other.
    plan = await service.turn("other")
    table = service._table
    conversation = table.get("other")
    assert conversation is not None
    if plan.prefiller_id is None:
        table._engines.join_queue(conversation, "p", 70)
    assert table.prefillers["p"].queued_tokens
    await service.engine_lost("p", "it died")
    assert conversation.prefiller_id is None
    assert (table.prefillers, [*table.decoders]) == ({}, ["d"])
    known = table.get("c")
    assert known is not None
    assert known.home is None
    again = await service.turn("c", ends=True)
    assert (again.decoder_id, again.prefiller_id) == ("d", None)
    # It comes back with nothing.
    await service.register(host())
    view = await service.shown_engine("p")
    assert (view["conversations"], view["held_tokens"], view["queued_tokens"]) == (0, 0, 0)


async def test_a_new_table_learns_what_it_holds() -> None:
    service = await Drive.of(placement="elastic")
    held = History("c", 1, 0.0, 0.0)
    held.held_tokens, held.turns = 110, 1
    assert await service.register(host(holds=[held])) == []
    await service.register(engine("d"))
    service._recovery.complete.set()
    plan = await service.later("c")
    assert (plan.decoder_id, plan.later) == ("p", True)
    # Whoever says that it has it as well is to forget it, once it has ended at the latest.
    assert await service.register(engine("d2", holds=[held])) == [("c", 1)]
    await service.release("c")
    heard = await service.beat("p")
    assert heard is not None
    assert heard.ended == [("c", 1)]


async def test_one_that_leaves_stays_for_its_prompts_and_its_conversations() -> None:
    service = await a_service()
    service._autoscaler.wanted["prefiller"] = Wanted(Scaling(0))
    await service.turn("c", ends=True)
    await service.register(engine("d"))
    assert await service.leave("p", False)
    # It gets nothing new, and keeps what it has.
    assert (await service.turn("new", ends=True)).decoder_id == "d"
    assert (await service.turn("c", ends=True)).decoder_id == "p"
    await service.release("c")
    conversation = service._table.get("new")
    assert conversation is not None
    service._table._engines.join_queue(conversation, "p", 70)
    assert await service.leave("p", False)
    # Its decoder computes it, if that takes for too long.
    assert not await service.leave("p", True)
    service._table._engines.leave_queue(conversation)
    assert not await service.leave("p", False)
    await service.left("p")
    assert [one.id for one in await service.engines()] == ["d"]


async def test_loads_are_shown_while_their_engines_live() -> None:
    service = await a_service("d")
    assert (await service.shown_engine("d"))["load"] is None
    await service.beat("d", None, EngineLoad(700, 3, 0.02, 5000.0, 900, 80, overdue_loads=2))
    await service.beat("p", None, EngineLoad())
    assert (await service.shown_engine("d"))["load"] == {
        "prefill_tokens": 700, "decodes": 3, "step_s": 0.02, "prefill_tokens_per_s": 5000.0,
    }  # fmt: skip
    assert (await service.shown_engine("p"))["load"] == {
        "prefill_tokens": 0, "decodes": 0, "step_s": None, "prefill_tokens_per_s": None,
    }  # fmt: skip
    of = 'engine="d",role="decoder"'
    assert await service.says(f"conserve_engine_prefill_tokens{{{of}}} 700.0")
    assert await service.says(f"conserve_engine_decodes{{{of}}} 3.0")
    assert await service.says(f"conserve_engine_step_seconds{{{of}}} 0.02")
    assert await service.says(f"conserve_engine_prefill_tokens_per_second{{{of}}} 5000.0")
    assert await service.says('conserve_engine_decodes{engine="p",role="prefiller"} 0.0')
    assert await service.says(f'conserve_engine_text_tokens_total{{{of},source="kept"}} 900.0')
    assert await service.says(f'conserve_engine_text_tokens_total{{{of},source="new"}} 80.0')
    assert await service.says(f"conserve_engine_load_failures_total{{{of}}} 2.0")
    for name in ("step_seconds", "text_tokens_total"):
        assert f'conserve_engine_{name}{{engine="p"'.encode() not in await service.metrics()
    await service.engine_lost("d", "it died")
    assert b'engine="d"' not in await service.metrics()
    # One that is not known, or not any more, leaves nothing.
    assert await service.beat("d", None, EngineLoad(decodes=1)) is None
    assert b'engine="d"' not in await service.metrics()
