"""The driver against an endpoint that counts: what it sends, and what it writes down."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from conserve_lab.client import Endpoint, EndpointError
from conserve_lab.driver import ArrivalPlan, DriveOptions, Progress, Run, drive, unloaded
from conserve_lab.records import Answer, TurnRecord, TurnRequest
from tests.unit.conserve_lab.stub import (
    Planned,
    Stub,
    forget,
    hang,
    refuse,
    serving,
    streams,
    token,
)

LOST = {"error": {"message": "the decoder was lost"}}


async def _drive(
    stub: Stub, plan: ArrivalPlan, options: DriveOptions | None = None, **endpoint: object
) -> Run:
    async with serving(stub):
        return await drive(_endpoint(stub, **endpoint), plan, options)


def _endpoint(stub: Stub, **changes: object) -> Endpoint:
    return replace(Endpoint("stub", stub.url), **changes)  # type: ignore[arg-type]


def _turns(*prompts: str) -> list[tuple[float, str, bool | None]]:
    return [(0.0, prompt, None) for prompt in prompts]


async def test_a_conversation_is_played_in_order() -> None:
    stub = Stub()
    script = Planned("c", [(0.0, "one", False), (0.01, "two", False), (0.02, "three", True)])
    run = await _drive(stub, [(0.0, script)], DriveOptions(cache_salt="salt", id_prefix="run-"))

    assert [seen.body["prompt"] for seen in stub.turns] == ["one", "two", "three"]
    assert {seen.path for seen in stub.turns} == {"/v1/completions"}
    assert {seen.headers["X-Conversation-Id"] for seen in stub.turns} == {"run-c"}
    assert {seen.body["cache_salt"] for seen in stub.turns} == {"salt"}
    assert {seen.body["model"] for seen in stub.turns} == {"stub-model"}
    assert stub.released == ["run-c"]
    assert script.answers == [None, Answer("xxx"), Answer("xxx"), Answer("xxx")]
    assert not run.interrupted
    assert (run.arrived, run.wrong_lengths, run.not_released) == (1, 0, 0)

    records = run.records
    assert [record.turn for record in records] == [1, 2, 3]
    assert [record.last for record in records] == [False, False, True]
    assert [record.effective for record in records] == [False, False, True]
    assert [record.reused_tokens for record in records] == [0, 1, 2]
    for record in records:
        assert record.outcome == "completed"
        assert record.error is None
        assert (record.system, record.conversation, record.server) == ("stub", "c", "d1")
        assert record.output_tokens == len(record.token_times_s) == 3
        assert (record.prompt_tokens, record.cached_tokens) == (
            len(stub.turns[record.turn - 1].body["prompt"]),
            1,
        )
        times = [record.planned_s, record.sent_s, *record.token_times_s, record.ended_s]
        assert times == sorted(times)
    # Each turn was wanted its gap after the one before had ended.
    assert records[0].planned_s == 0.0
    assert records[1].planned_s == records[0].ended_s + 0.01
    assert records[2].planned_s == records[1].ended_s + 0.02


async def test_conversations_arrive_when_planned_however_slow_the_others() -> None:
    stub = Stub({"slow": hang})
    plan = [(0.0, Planned("a", _turns("slow"))), (0.01, Planned("b", _turns("quick")))]
    run = await _drive(stub, plan, DriveOptions(turn_timeout_s=1.0))
    planned = {record.conversation: record.planned_s for record in run.records}
    assert planned == {"a": 0.0, "b": 0.01}
    assert [record.conversation for record in run.records] == ["b", "a"]


async def test_so_many_at_a_time() -> None:
    stub = Stub()
    plan = [(0.0, Planned(f"c{n}", _turns("one", "two"))) for n in range(4)]
    run = await _drive(stub, plan, DriveOptions(concurrency=1))
    order = [seen.headers["X-Conversation-Id"] for seen in stub.turns]
    assert order == ["c0", "c0", "c1", "c1", "c2", "c2", "c3", "c3"]
    starts = [record.planned_s for record in run.records if record.turn == 1]
    ends = [record.ended_s for record in run.records if record.turn == 2]
    assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))


async def test_unloaded_runs_one_at_a_time_without_gaps() -> None:
    stub = Stub()
    scripts = [Planned(f"c{n}", [(0.0, "one", None), (1000.0, "two", None)]) for n in range(2)]

    async with serving(stub):
        records = (await unloaded(_endpoint(stub), scripts)).records
    assert [(record.conversation, record.turn) for record in records] == [
        ("c0", 1),
        ("c0", 2),
        ("c1", 1),
        ("c1", 2),
    ]
    assert records[1].planned_s == records[0].ended_s


@pytest.mark.parametrize(
    ("behaviour", "error", "tokens"),
    [
        (refuse, "HTTP 429: full; try again later", 0),
        (streams(token(), end="closed"), "broken stream: ", 1),
        (streams(token(), end="silent"), "broken stream: it ended without [DONE]", 1),
        (streams(token(), LOST), "error event: the decoder was lost", 1),
        (streams(token("abort")), "given up: the server ended it with finish_reason 'abort'", 1),
        (streams(), "empty stream: it has neither output nor a finish_reason", 0),
        (forget, "connection: ", 0),
    ],
)
async def test_a_failed_turn_ends_its_conversation_alone(
    behaviour: Callable[..., Awaitable[None]], error: str, tokens: int
) -> None:
    stub = Stub({"bad": behaviour})
    bad, good = Planned("bad", _turns("fine", "bad", "never")), Planned("good", _turns("a", "b"))
    run = await _drive(stub, [(0.0, good), (0.0, bad)])
    ends = {(r.conversation, r.turn): r for r in run.records}
    assert set(ends) == {("good", 1), ("good", 2), ("bad", 1), ("bad", 2)}
    failed = ends["bad", 2]
    assert failed.outcome == "failed"
    assert failed.error is not None
    assert failed.error.startswith(error)
    assert len(failed.token_times_s) == tokens
    assert not failed.last
    assert ends["good", 2].last
    assert len(bad.answers) == 2
    assert sorted(stub.released) == ["bad", "good"]


async def test_a_turn_over_its_time_is_given_up() -> None:
    stub = Stub({"slow": hang})
    plan = [(0.0, Planned("c", _turns("slow", "never")))]
    (record,) = (await _drive(stub, plan, DriveOptions(turn_timeout_s=1.0))).records
    assert record.outcome == "timeout"
    assert record.error == "timeout: no whole answer within 1 s"
    assert len(record.token_times_s) == 1
    assert record.ended_s > record.token_times_s[0]


async def test_a_stop_leaves_open_turns_unfinished() -> None:
    stub = Stub({"slow": hang})
    resting = Planned("resting", [(0.0, "one", True), (1000.0, "two", True)])
    plan = [
        (0.0, Planned("open", _turns("one", "slow"))),
        (0.0, resting),
        (1000.0, Planned("later", _turns("one"))),
    ]

    stop = asyncio.Event()

    def on_progress(progress: Progress) -> None:
        if len(stub.turns) == 3 and progress.turns == 2:
            stop.set()

    async with serving(stub):
        run = await drive(_endpoint(stub), plan, stop=stop, on_progress=on_progress)
    assert run.interrupted
    assert run.arrived == 2
    outcomes = {(r.conversation, r.turn): (r.outcome, r.last) for r in run.records}
    assert outcomes == {
        ("open", 1): ("completed", False),
        ("open", 2): ("unfinished", False),
        ("resting", 1): ("completed", False),
    }
    assert sorted(stub.released) == ["open", "resting"]


async def test_the_duration_ends_a_run() -> None:
    stub = Stub({"slow": hang})
    run = await _drive(stub, [(0.0, Planned("c", _turns("slow")))], DriveOptions(duration_s=0.5))
    assert run.interrupted
    assert [record.outcome for record in run.records] == ["unfinished"]


async def test_being_cancelled_records_and_propagates() -> None:
    stub = Stub({"slow": hang})
    records: list[TurnRecord] = []
    async with serving(stub):
        plan = [(0.0, Planned("c", _turns("slow")))]
        driving = asyncio.ensure_future(drive(_endpoint(stub), plan, on_record=records.append))
        await stub.hanging.wait()
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving
    assert [record.outcome for record in records] == ["unfinished"]


async def test_nothing_there_is_one_clear_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        plan = [(0.0, Planned("c", _turns("one")))]
        with pytest.raises(EndpointError, match=f"nothing answers at {url}"):
            await drive(Endpoint("s", url), plan)
        plan = [(0.0, Planned("c", _turns("one")))]
        with pytest.raises(EndpointError, match="answered the first turn: connection: ") as caught:
            await drive(Endpoint("s", url, model="m"), plan)
        assert "\n" not in str(caught.value)


async def test_every_end_that_could_not_be_told_is_counted() -> None:
    stub = Stub(refuses_deletes=True)
    plan = [(0.0, Planned(f"c{n}", _turns("one"))) for n in range(20)]
    run = await _drive(stub, plan)
    assert len(set(stub.released)) == 20
    assert run.not_released == 20
    assert {record.outcome for record in run.records} == {"completed"}


async def test_energy_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter((100.0, 130.0, None, None))
    monkeypatch.setattr("conserve_lab.driver.gpu_energy_j", lambda: next(readings))
    for expected in (30.0, None):
        assert (await _drive(Stub(), [(0.0, Planned("c", _turns("one")))])).energy_j == expected
    with pytest.raises(StopIteration):
        next(readings)
    assert Endpoint("s", "http://localhost/x").is_here
    assert not Endpoint("s", "http://10.1.2.3:8000").is_here


async def test_a_peer_may_have_its_model_chosen_and_be_told_of_no_end() -> None:
    stub = Stub(models=["other", "first"])
    names = ("x-session-id", "x-user")
    plan = [(0.0, Planned("c", _turns("one")))]
    await _drive(stub, plan, model="first", conversation_headers=names, release=False)
    (seen,) = stub.turns
    assert seen.body["model"] == "first"
    assert [seen.headers[name] for name in names] == ["c", "c"]
    assert stub.released == []


async def test_a_server_that_does_not_keep_to_lengths_is_noticed() -> None:
    class Longer(Planned):
        def next(self, answer: Answer | None) -> TurnRequest | None:
            request = super().next(answer)
            return request and replace(request, output_tokens=5)

    assert (await _drive(Stub(), [(0.0, Longer("c", _turns("one", "two")))])).wrong_lengths == 2
