"""LMCache's connector: what is looked up, stored and kept, and what a broken step leaves."""

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.async_engine_driven import (
    AsyncEngineDrivenTransferContext,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from conserve import wire
from conserve.late_kv import LateKV
from deployments.engine import lmcache_connector
from deployments.engine.lmcache_connector import ResilientMPConnector
from deployments.engine.stores import FORGOTTEN_S, StepNotes
from deployments.engine.vision.images import WorkersFailures
from deployments.upstream.lost_server import Connection
from tests.unit.deployments.engine.connectors import scheduler_half, worker_half
from tests.unit.deployments.waiting import eventually

PREFILLED = wire.transfer_params(prefilled=True)


class LateServer:
    """In the place of LMCache's scheduler adapter: tells of a prompt when it is asked again."""

    lmcache_tokens_per_chunk = 128
    is_healthy = True
    tp_size = 1

    def __init__(self, *found: int) -> None:
        self.found = list(found)
        self.asked: list[str] = []
        self.freed: list[tuple[int, int]] = []
        self.freeing: list[Any] = []
        self.req_clients = {"url": self}

    def maybe_submit_lookup_request(self, request_id: str, **what: object) -> None:
        if "look-up" not in self.asked[-1:]:
            self.asked.append("look-up")

    def check_lookup_result(self, request_id: str) -> int:
        return self.found[0] if len(self.found) == 1 else self.found.pop(0)

    def cleanup_lookup_result(self, request_id: str) -> None:
        self.asked.append("over")

    def end_session(self, request_id: str) -> None:
        self.asked.append("ended")

    def _create_key(self, ids: list[int], start: int, end: int, *more: object) -> Any:
        return SimpleNamespace(no_worker_id_version=lambda: (start, end))

    def free_lookup_locks(self, key: tuple[int, int], tp_size: int) -> Any:
        self.freed.append(key)
        self.freeing.append(MessagingFuture())
        return self.freeing[-1]


def _request(
    tokens: int | None, params: dict[str, Any] | None = None, name: str = "r", **more: Any
) -> Any:
    asked = {"kv_transfer_params": wire.transfer_params() if params is None else params}
    sampling = SamplingParams(max_tokens=1, extra_args=asked)
    return Request(name, tokens and [1] * tokens, sampling, None, **more)


def _step_of_one(connector: Any, tokens: int) -> Any:
    """Return what is stored by a step that computes `tokens` of the request "r", of 512."""
    tracker = connector.request_trackers["r"]
    tracker.append_block_ids(([1, 2, 3, 4],))
    tracker.increase_num_scheduled_tokens(tokens)
    return LMCacheMPRequestMetadata.GetStoreMetadata(tracker, 128, [128])


def _told(connector: Any, request: Any) -> wire.CachedTokens:
    request.status = RequestStatus.FINISHED_STOPPED
    return wire.cached_tokens(connector.request_finished(request, [])[1])


@pytest.mark.parametrize("stores", [True, False])
def test_a_request_that_is_aborted_before_it_was_looked_up_ends_as_any_other(stores: bool) -> None:
    """A prefiller's queue of prompts whose clients leave: LMCache's connector fails on each."""
    server = LateServer()
    connector, request = scheduler_half(server, _can_store=stores), _request(3)
    request.status = RequestStatus.FINISHED_ABORTED
    with pytest.raises(AssertionError, match="not found"):
        LMCacheMPConnector.request_finished(connector, request, [])
    kept, params = connector.request_finished(request, [])
    assert not kept
    assert wire.cached_tokens(params).lmcache_tokens == 0
    assert server.asked == ["over", "ended"]
    assert not connector.request_trackers


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_and_not_loaded() -> None:
    """Where KV was loaded there are none, and vLLM's engine ends over that."""
    connector = scheduler_half(None)  # Nobody can be asked.
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=0), None)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert list(connector.request_trackers) == ["r"]
    with pytest.raises(AttributeError, match="NoneType"):
        connector.get_num_new_matched_tokens(_request(3, name="o"), 0)


def test_prompts_with_other_images_have_other_keys() -> None:
    """From the image on; vLLM gives both the same token ids."""
    connector = scheduler_half(None)
    text, placeholders = [5, 6, 7], [9] * 8

    def keyed(name: str, image: str) -> list[int]:
        where = PlaceholderRange(offset=len(text), length=len(placeholders))
        feature = MultiModalFeatureSpec(None, "image", image, where, mm_hash=image)
        request = Request(
            name, [*text, *placeholders, *text], SamplingParams(), None, mm_features=[feature]
        )
        ids: list[int] = connector._get_or_create_request_tracker(request).get_token_ids()
        return ids

    one, same, other = keyed("r1", "a"), keyed("r2", "a"), keyed("r3", "b")
    assert one == same
    assert one[:3] == one[-3:] == other[:3] == other[-3:] == text
    assert not set(one[3:-3]) & {*other[3:-3], 9}


@pytest.mark.parametrize("embeddings", [True, False])
def test_a_prompt_of_embeddings_is_neither_loaded_nor_stored(embeddings: bool) -> None:
    """It has no token ids, so it would share its keys with all others of its kind."""
    server = LateServer(0)
    connector = scheduler_half(server, _can_store=True, _reserve_last_token_for_lookup=True)
    prompt = {"prompt_embeds": torch.zeros(256, 4)} if embeddings else {}
    request = _request(None if embeddings else 256, **prompt)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert bool(server.asked) is not embeddings
    assert (_step_of_one(connector, 256) is None) is embeddings


@pytest.mark.parametrize(
    ("kept_tokens", "has", "start"), [(128, 256, 128), (0, 256, 0), (128, 0, 0)]
)
def test_what_a_disk_has_for_certain_is_not_looked_up(
    kept_tokens: int, has: int, start: int
) -> None:
    """A look-up would load it, beside the engine that has it; what the disk lacks is stored."""
    server = LateServer(0)
    connector = scheduler_half(server, _can_store=True, _parks=True)
    params = wire.transfer_params(256, park=True, kept_tokens=kept_tokens)
    assert connector.get_num_new_matched_tokens(_request(390, params), has) == (0, False)
    assert server.asked == ["look-up"] * (not has)
    assert _step_of_one(connector, 390 - has).op.start == start


@pytest.mark.parametrize(
    ("role", "params", "asks", "stores"),
    [
        ("kv_producer", wire.transfer_params(), True, True),
        ("kv_both", wire.transfer_params(256), False, False),
        ("kv_both", wire.transfer_params(256, park=True), True, True),
        ("kv_both", wire.transfer_params(512), True, False),
        ("kv_both", wire.transfer_params(), True, False),
        ("kv_consumer", wire.transfer_params(256), False, False),
        ("kv_consumer", wire.transfer_params(512), True, False),
    ],
)
def test_a_decoder_stores_what_it_is_told_to_and_asks_for_what_it_has_not(
    role: str, params: dict[str, object], asks: bool, stores: bool
) -> None:
    """A prompt of three chunks, of which it has two; LMCache has none."""
    server = LateServer(0)
    connector = scheduler_half(
        server, _can_store=role != "kv_consumer", _parks=role == "kv_both",
        _reserve_last_token_for_lookup=True,
    )  # fmt: skip
    assert connector.get_num_new_matched_tokens(_request(390, params), 256) == (0, False)
    assert server.asked == ["look-up"] * asks
    stored = _step_of_one(connector, 134)
    # All of its whole chunks, those too that it had before.
    assert (None if stored is None else (stored.op.start, stored.op.end)) == (
        (0, 384) if stores else None
    )


# --- what was said to be stored, and is not found yet --------------------------------------------


def _decoder(server: LateServer) -> tuple[Any, list[float]]:
    """A decoder's connector, and its clock."""
    connector, now_s = scheduler_half(server), [0.0]
    connector._late = LateKV(lambda: now_s[0])
    return connector, now_s


def test_what_a_prefiller_has_just_stored_is_looked_up_until_it_is_there() -> None:
    """LMCache tells of it some milliseconds after its store: first of nothing, then of a part."""
    server = LateServer(0, 256, 384)
    connector, now_s = _decoder(server)
    request = _request(400, PREFILLED)
    # Meanwhile the scheduler goes on with others.
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    assert server.asked == ["look-up", "over"]
    now_s[0] += 0.006
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    assert server.freed == [(0, 256)]
    # Of what was found, the server is to let go before it is asked again: it counts readers.
    now_s[0] += 0.5
    assert connector.get_num_new_matched_tokens(request, 0) == (None, True)
    server.freeing[0].set_result(None)
    assert connector.get_num_new_matched_tokens(request, 0) == (384, True)
    assert server.asked.count("look-up") == 3
    told = _told(connector, request)
    assert (told.lmcache_tokens, told.missed_tokens, told.late) == (384, 0, True)


def test_what_stays_away_is_computed_and_counted() -> None:
    server = LateServer(128)
    connector, now_s = _decoder(server)
    request = _request(400, PREFILLED)
    matched, asked = (None, True), 0
    while matched == (None, True):
        now_s[0] += 0.001
        asked += 1
        matched = connector.get_num_new_matched_tokens(request, 0)
        for future in server.freeing:
            future.set_result(None)
    assert matched == (128, True)
    # It was given up soon.
    assert asked < 100
    # Asked again, because there is no room for it yet, it is not looked up from the beginning.
    assert connector.get_num_new_matched_tokens(request, 0) == (128, True)
    told = _told(connector, request)
    assert (told.lmcache_tokens, told.missed_tokens, told.late) == (128, 256, True)


def test_what_a_server_that_died_does_not_have_is_counted() -> None:
    server = LateServer(0)
    server.is_healthy = False
    connector, _ = _decoder(server)
    request = _request(400, PREFILLED)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert server.asked == ["look-up"]
    told = _told(connector, request)
    assert (told.lmcache_tokens, told.missed_tokens, told.late) == (0, 384, False)


@pytest.mark.parametrize(
    ("params", "own_tokens", "server"),
    [
        # Nobody said that it is there.
        (wire.transfer_params(), 0, LateServer(0)),
        # All of it is, or what is not the decoder has itself.
        (PREFILLED, 0, LateServer(384)),
        (PREFILLED, 384, LateServer(0)),
    ],
)
def test_nothing_is_looked_up_twice_without_a_reason(
    params: dict[str, Any], own_tokens: int, server: LateServer
) -> None:
    connector, _ = _decoder(server)
    request = _request(400, params)
    matched, _ = connector.get_num_new_matched_tokens(request, own_tokens)
    assert matched is not None
    assert server.asked == ["look-up"]
    told = _told(connector, request)
    assert (told.missed_tokens, told.late) == (0, False)


# --- what is stored, step by step ----------------------------------------------------------------


class Worker:
    """A worker's connector, and where LMCache's adapter stands in it; stores are answered by hand.

    Attributes:
        older: whether vLLM's first GPU runner runs the steps.
        stores: every store that was asked for.
        told: requests whose prompts were said to be stored.
    """

    is_healthy = True
    transfer_ctx: Any = None

    def __init__(self) -> None:
        self.store_futures: dict[str, Any] = {}
        self.store_events: dict[str, Any] = {}
        self.retrieve_futures: dict[str, Any] = {}
        self.older = False
        self.stores: list[Any] = []
        self.told: list[str] = []
        self.connection = Connection()
        self.now_s = 0.0
        self.connector = worker_half(self, self.connection)
        self.connector._stores.tell = lambda address: self.told.append(address[0])

    def get_finished(self, ids: set[str]) -> tuple[set[str], set[str]]:
        assert not ids
        loaded = {one for one, (future, _) in self.retrieve_futures.items() if future.query()}
        for one in loaded:
            del self.retrieve_futures[one]
        return set(), loaded

    def under_way(self, request_id: str) -> bool:
        found: bool = self.connector._stores.under_way(request_id)
        return found

    def step(
        self, step: int, *stores: str, error: BaseException | None = None, **notes: Any
    ) -> tuple[set[str], set[str]]:
        """Return requests whose stores and loads are over after a step; raises ``error`` in it."""
        self.connector.bind_connector_metadata(_metadata(step, *stores, **notes))
        if not self.older:
            # What comes after the forward pass is left out if that breaks.
            if error is not None:
                raise error
            return self._end()
        try:
            if error is not None:
                raise error
        finally:
            finished = self._end()
        return finished

    def _end(self) -> tuple[set[str], set[str]]:
        self.connector.wait_for_save()
        finished: tuple[set[str], set[str]] = self.connector.get_finished(set())
        self.connector.clear_connector_metadata()
        return finished


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()

    def store(self: Any) -> None:
        for one in self._connector_metadata.requests:
            made.stores.append(MessagingFuture())
            made.store_futures[one.request_id] = made.stores[-1]

    monkeypatch.setattr(LMCacheMPConnector, "wait_for_save", store)
    return made


@pytest.fixture(params=[False, True], ids=["newer runner", "older runner"])
def either_worker(worker: Worker, request: pytest.FixtureRequest) -> Worker:
    worker.older = request.param
    return worker


def _metadata(step: int, *stores: str, images: Any = None, **more: str) -> Any:
    told = {what: {name: [name, 0] for name in more.get(what, "")} for what in ("whole", "gone")}
    known = {what: frozenset(more.get(what, "")) for what in ("ended", "preempted")}
    requests = [SimpleNamespace(request_id=name) for name in stores]
    notes = StepNotes(step, **told, **known, images=images or {})
    return SimpleNamespace(requests=requests, notes=notes)


def test_kv_of_an_image_that_could_not_be_encoded_is_not_stored(
    either_worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a request that shares it with the one for which it was encoded."""
    own = WorkersFailures()
    monkeypatch.setattr(lmcache_connector, "failures", own)
    own.add("bad")
    either_worker.step(0, "a", "b", "c", images={"a": ["bad", "good"], "b": ["good"]})
    assert [either_worker.under_way(name) for name in "abc"] == [False, True, True]


def test_what_a_broken_step_computed_is_not_stored_nor_what_builds_on_it(
    either_worker: Worker,
) -> None:
    """With asynchronous scheduling the next step of the same prompt is under way already."""
    either_worker.step(0, "r")
    assert len(either_worker.stores) == 1
    for error in (SystemExit(), RuntimeError("out of memory")):
        with pytest.raises(type(error)):
            either_worker.step(1, "r", error=error)
    either_worker.step(2, "r")
    assert len(either_worker.stores) == 1


def test_a_step_that_did_not_come_to_the_connector_counts_as_broken(either_worker: Worker) -> None:
    either_worker.step(0, "r")
    either_worker.step(2, "r")
    assert len(either_worker.stores) == 1


def test_no_step_waits_and_a_prompt_is_told_of_when_all_of_it_is_stored(worker: Worker) -> None:
    """A step that waits holds up all turns of its engine."""
    # Nobody answers these, and nobody waits; of "b" there is more to come.
    worker.step(0, "a", "b")
    worker.step(1, "a", whole="ac")
    # Of "c" nothing was stored.
    eventually(lambda: worker.told == ["c"])
    # Of "a" all have to be there, also those of earlier steps; in whatever order.
    worker.stores[2].set_result(True)
    time.sleep(0.05)
    assert worker.told == ["c"]
    # While another step is computed: none has to end for that.
    worker.connector.bind_connector_metadata(_metadata(2))
    worker.stores[0].set_result(True)
    eventually(lambda: worker.told == ["c", "a"])
    worker.connector.clear_connector_metadata()
    # What ended early is told of with what was begun for it.
    worker.connector.bind_connector_metadata(_metadata(3, gone="b"))
    time.sleep(0.05)
    assert worker.told == ["c", "a"]
    worker.stores[1].set_result(False)
    eventually(lambda: worker.told == ["c", "a", "b"])


def test_a_store_that_cannot_be_begun_is_told_of_as_over(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Mock(side_effect=RuntimeError("KV caches are not registered"))
    monkeypatch.setattr(LMCacheMPConnector, "wait_for_save", fails)
    worker.step(0, "a", whole="a")
    eventually(lambda: worker.told == ["a"])


def test_a_prompt_of_a_broken_step_is_not_told_of(either_worker: Worker) -> None:
    with pytest.raises(SystemExit):
        either_worker.step(0, "a", whole="a", error=SystemExit())
    either_worker.step(1, gone="a")
    time.sleep(0.05)
    assert either_worker.told == []


def test_blocks_are_kept_until_every_store_of_their_request_is_over(worker: Worker) -> None:
    """LMCache's own account is of a request's last store; the server answers in any order."""
    worker.step(0, "a", "b")
    worker.step(1, "a")
    worker.stores[1].set_result(True)
    worker.stores[2].set_result(True)
    assert worker.step(2, ended="ab") == ({"b"}, set())
    # A server that is only silent may still read them.
    worker.is_healthy = False
    assert worker.step(3) == (set(), set())
    worker.stores[0].set_result(True)
    assert worker.step(4) == ({"a"}, set())
    assert worker.step(5) == (set(), set())


def test_a_server_that_is_gone_reads_nothing(worker: Worker) -> None:
    worker.step(0, "a")
    worker.connection.losses += 1
    assert worker.step(1, ended="a") == ({"a"}, set())


def test_a_store_that_is_never_answered_is_given_up(worker: Worker) -> None:
    """LMCache's server only logs an error of its own."""
    worker.connector._stores.clock = lambda: worker.now_s
    worker.step(0, "a")
    assert worker.step(1, ended="a") == (set(), set())
    worker.now_s += FORGOTTEN_S
    assert worker.step(2) == ({"a"}, set())


def test_a_copy_of_the_workers_own_is_over_when_it_is(worker: Worker) -> None:
    """Its server may be gone while it still reads, and be back before it is done."""
    worker.connector._stores.clock = lambda: worker.now_s
    worker.transfer_ctx = AsyncEngineDrivenTransferContext(1, None)
    worker.step(0, "a")
    worker.connection.losses += 1
    worker.now_s += FORGOTTEN_S
    assert worker.step(1, ended="a") == (set(), set())
    worker.stores[0].set_result(False)
    assert worker.step(2) == ({"a"}, set())


def test_blocks_that_change_hands_are_waited_for(worker: Worker) -> None:
    """A request that is preempted gives up its blocks at once; others keep theirs."""
    worker.step(0, "a", "b")
    worker.connector.handle_preemptions(_metadata(1))
    given = (_metadata(1, preempted="a"),)
    done = threading.Thread(target=worker.connector.handle_preemptions, args=given, daemon=True)
    done.start()
    done.join(0.2)
    assert done.is_alive()
    worker.stores[0].set_result(True)
    done.join(30)
    assert not done.is_alive()


def test_a_load_whose_connection_broke_fails_and_not_the_engine(worker: Worker) -> None:
    """On a GPU LMCache's future raises when it is asked."""
    lost = TimeoutError("the connection to the LMCache server is lost")
    worker.retrieve_futures["r"] = (Mock(query=Mock(side_effect=lost)), [1, 2])
    assert worker.step(0) == (set(), {"r"})


def _scheduling(role: str, **prompts: int) -> tuple[Any, dict[str, Any], Any]:
    """A scheduler's connector, requests with so many tokens that are stored, and its steps."""
    connector, _ = _decoder(LateServer(0))
    connector._can_store, connector._parks = role != "kv_consumer", role == "kv_both"
    begun: set[str] = set()
    requests = {}
    for name, tokens in prompts.items():
        params = {**wire.transfer_params(park=True), wire.STORED_TO: [name, 0]}
        requests[name] = request = _request(tokens, params, name)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        connector.request_trackers[name].append_block_ids(([1, 2, 3, 4],))

    def step(preempted: str = "", begins: int = 0, **scheduled: int) -> Any:
        """Schedule tokens by request; a new request begins at ``begins``."""
        new = [one for one in scheduled if one not in begun]
        cached = [one for one in scheduled if one in begun]
        begun.update(new)
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=one, num_computed_tokens=begins, mm_features=[])
                for one in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                new_block_ids=[None] * len(cached),
                resumed_req_ids=set(),
                num_computed_tokens=[0] * len(cached),
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(preempted),
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
        )
        return connector.build_connector_meta(output)

    return connector, requests, step


def _finish(connector: Any, request: Any) -> bool:
    request.status = RequestStatus.FINISHED_STOPPED
    kept: bool = connector.request_finished(request, [])[0]
    return kept


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_workers_are_told_whose_prompt_ends_and_whose_blocks_are_kept(role: str) -> None:
    """A prompt of three chunks in two steps; others store nothing, or are preempted."""
    connector, requests, step = _scheduling(role, a=390, b=100, c=390)
    first = step(a=256, b=100, c=256).notes
    second = step(a=134, preempted="c").notes
    # Of "b" there is no whole chunk: at once it is as stored as it can be.
    assert (dict(first.whole), dict(second.whole)) == ({"b": ["b", 0]}, {"a": ["a", 0]})
    assert (first.preempted, second.preempted) == (frozenset(), frozenset("c"))
    kept = {name: _finish(connector, request) for name, request in requests.items()}
    # Of "b" nothing was stored; from "c" the blocks were taken before.
    assert kept == {"a": True, "b": False, "c": False}
    third, fourth = step().notes, step().notes
    assert (third.ended, fourth.ended) == (frozenset("a"), frozenset())
    # Whoever waits for "c" is to hear all the same.
    assert (dict(third.gone), dict(fourth.gone)) == ({"c": ["c", 0]}, {})
    assert [one.step for one in (first, second, third, fourth)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("begins", "tokens", "stores"), [(383, 1, 384), (256, 16, 256)])
def test_what_vllm_has_when_a_request_begins_is_stored_and_no_more(
    begins: int, tokens: int, stores: int
) -> None:
    """LMCache's account is rounded; vLLM may begin where groups of layers agree."""
    connector, _, step = _scheduling("kv_both", a=384)
    connector.request_trackers["a"].num_vllm_hit_tokens = 368
    metadata = step(begins=begins, a=tokens)
    assert [(one.op.start, one.op.end) for one in metadata.requests] == [(0, stores)]
    assert dict(metadata.notes.whole) == ({"a": ["a", 0]} if stores == 384 else {})


def test_an_engine_that_stores_nothing_keeps_nobody_waiting() -> None:
    connector, requests, step = _scheduling("kv_consumer", a=390)
    assert dict(step(a=390).notes.whole) == {"a": ["a", 0]}
    assert not _finish(connector, requests["a"])


def test_the_server_is_told_nothing_for_its_metrics() -> None:
    """The name is LMCache's: if it changes, every turn sends its whole prompt again."""
    name = "_report_block_allocation_deltas"
    assert name in LMCacheMPConnector.build_connector_meta.__code__.co_names
    assert getattr(ResilientMPConnector, name) is not getattr(LMCacheMPConnector, name)
