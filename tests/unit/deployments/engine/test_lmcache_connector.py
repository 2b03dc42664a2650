"""LMCache's connector: what is looked up, stored and kept, and what a broken step leaves."""

from types import SimpleNamespace
from typing import Any

import pytest

from conserve import wire


@pytest.mark.parametrize("stores", [True, False])
def test_a_request_that_is_aborted_before_it_was_looked_up_ends_as_any_other(stores: bool) -> None:
    """A prefiller's queue of prompts whose clients leave: LMCache's connector fails on each."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    from deployments.engine.lmcache_connector import ResilientMPConnector

    ended: list[str] = []

    class Adapter:
        def cleanup_lookup_result(self, request_id: str) -> None:
            ended.append(f"look-up of {request_id}")

        def end_session(self, request_id: str) -> None:
            ended.append(f"session of {request_id}")

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
    connector.scheduler_adapter = Adapter()
    connector._can_store = stores
    connector._prepare_scheduler()
    parameters = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": wire.transfer_params()}
    )
    request = Request("r", [1, 2, 3], parameters, None)
    request.status = RequestStatus.FINISHED_ABORTED
    with pytest.raises(AssertionError, match="not found"):
        LMCacheMPConnector.request_finished(connector, request, [])
    kept, params = connector.request_finished(request, [])
    assert not kept
    assert wire.cached_tokens(params).lmcache_tokens == 0
    assert ended == ["look-up of r", "session of r"]
    assert not connector.request_trackers


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_and_not_loaded() -> None:
    """Where KV was loaded there are none, and vLLM's engine ends over that."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from deployments.engine.lmcache_connector import ResilientMPConnector

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
    connector._can_store = False
    connector._prepare_scheduler()
    # There is no adapter: nobody can be asked.
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=1, prompt_logprobs=0), None)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert list(connector.request_trackers) == ["r"]
    other = Request("o", [1, 2, 3], SamplingParams(max_tokens=1), None)
    with pytest.raises(AttributeError, match="scheduler_adapter"):
        connector.get_num_new_matched_tokens(other, 0)


def test_prompts_with_other_images_have_other_keys() -> None:
    """From the image on; vLLM gives both the same token ids."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from deployments.engine.lmcache_connector import ResilientMPConnector

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
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
    import torch
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from deployments.engine.lmcache_connector import ResilientMPConnector

    class Adapter:
        lmcache_tokens_per_chunk = 128

        def maybe_submit_lookup_request(self, request_id: str, **asked: object) -> None:
            assert not embeddings

        def check_lookup_result(self, request_id: str) -> int:
            return 0

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
    connector.scheduler_adapter = Adapter()
    connector._can_store = connector._reserve_last_token_for_lookup = True
    connector._prepare_scheduler()
    connector._hit_alignment_tokens = 128
    connector._connector_stats = type("Stats", (), {"record_lookup": lambda self, took_s: None})()
    prompt = {"prompt_embeds": torch.zeros(256, 4)} if embeddings else {}
    ids = None if embeddings else [1] * 256
    request = Request("r", ids, SamplingParams(max_tokens=1), None, **prompt)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    tracker = connector.request_trackers["r"]
    tracker.append_block_ids(([1, 2],))
    tracker.increase_num_scheduled_tokens(256)
    stored = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, 128, [128])
    assert (stored is None) is embeddings


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
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from deployments.engine.lmcache_connector import ResilientMPConnector

    asked: list[str] = []

    class Adapter:
        lmcache_tokens_per_chunk = 128

        def maybe_submit_lookup_request(self, request_id: str, **what: object) -> None:
            asked.append(request_id)

        def check_lookup_result(self, request_id: str) -> int:
            return 0

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
    connector.scheduler_adapter = Adapter()
    connector._can_store = role != "kv_consumer"
    connector._parks = role == "kv_both"
    connector._prepare_scheduler()
    connector._reserve_last_token_for_lookup = True
    connector._hit_alignment_tokens = 128
    connector._connector_stats = type("Stats", (), {"record_lookup": lambda self, took_s: None})()
    parameters = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    request = Request("r", [1] * 390, parameters, None)
    assert connector.get_num_new_matched_tokens(request, 256) == (0, False)
    assert asked == ["r"] * asks
    tracker = connector.request_trackers["r"]
    tracker.append_block_ids(([1, 2, 3, 4],))
    tracker.increase_num_scheduled_tokens(134)
    stored = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, 128, [128])
    # All of its whole chunks, those too that it had before.
    assert (None if stored is None else (stored.op.start, stored.op.end)) == (
        (0, 384) if stores else None
    )


# --- what was said to be stored, and is not found yet --------------------------------------------


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
        from lmcache.v1.multiprocess.futures import MessagingFuture

        self.freed.append(key)
        self.freeing.append(MessagingFuture())
        return self.freeing[-1]


def _decoder(server: LateServer) -> tuple[Any, list[float]]:
    """A decoder's connector, and its clock."""
    from deployments.engine.late_kv import LateKV
    from deployments.engine.lmcache_connector import ResilientMPConnector

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = connector._can_store = False
    connector.scheduler_adapter = server
    connector._reserve_last_token_for_lookup = False
    connector._hit_alignment_tokens = 128
    connector._connector_stats = SimpleNamespace(record_lookup=lambda took_s: None)
    connector._prepare_scheduler()
    now_s = [0.0]
    connector._late = LateKV(lambda: now_s[0])
    return connector, now_s


def _request(tokens: int, **params: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    asked = {"kv_transfer_params": wire.transfer_params(**params)}
    return Request("r", [1] * tokens, SamplingParams(max_tokens=1, extra_args=asked), None)


def _told(connector: Any, request: Any) -> wire.CachedTokens:
    from vllm.v1.request import RequestStatus

    request.status = RequestStatus.FINISHED_STOPPED
    return wire.cached_tokens(connector.request_finished(request, [])[1])


def test_what_a_prefiller_has_just_stored_is_looked_up_until_it_is_there() -> None:
    """LMCache tells of it some milliseconds after its store: first of nothing, then of a part."""
    server = LateServer(0, 256, 384)
    connector, now_s = _decoder(server)
    request = _request(400, prefilled=True)
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
    request = _request(400, prefilled=True)
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


@pytest.mark.parametrize(
    ("params", "own_tokens", "server"),
    [
        # Nobody said that it is there.
        ({}, 0, LateServer(0)),
        # All of it is, or what is not the decoder has itself.
        ({"prefilled": True}, 0, LateServer(384)),
        ({"prefilled": True}, 384, LateServer(0)),
    ],
)
def test_nothing_is_looked_up_twice_without_a_reason(
    params: dict[str, Any], own_tokens: int, server: LateServer
) -> None:
    connector, _ = _decoder(server)
    request = _request(400, **params)
    matched, _ = connector.get_num_new_matched_tokens(request, own_tokens)
    assert matched is not None
    assert server.asked == ["look-up"]
    told = _told(connector, request)
    assert (told.missed_tokens, told.late) == (0, False)


# --- what is stored, step by step ----------------------------------------------------------------


class Worker:
    """Where LMCache's worker adapter stands in a connector: its stores are answered by hand."""

    is_healthy = True

    def __init__(self) -> None:
        self.store_futures: dict[str, Any] = {}
        self.store_events: dict[str, Any] = {}
        self.retrieve_futures: dict[str, Any] = {}

    def get_finished(self, ids: set[str]) -> tuple[set[str], set[str]]:
        assert not ids
        loaded = {one for one, (future, _) in self.retrieve_futures.items() if future.query()}
        for one in loaded:
            del self.retrieve_futures[one]
        return set(), loaded


def _worker(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A worker's connector, and every store that it asks for."""
    import threading

    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.v1.multiprocess.futures import MessagingFuture

    from deployments.engine.lmcache_client import Connection
    from deployments.engine.lmcache_connector import ResilientMPConnector

    stores = []

    def store(self: Any) -> None:
        for request_id in self._connector_metadata.stores:
            stores.append(MessagingFuture())
            self.worker_adapter.store_futures[request_id] = stores[-1]

    monkeypatch.setattr(LMCacheMPConnector, "wait_for_save", store)
    connector = object.__new__(ResilientMPConnector)
    connector.worker_adapter = Worker()
    connector.lazy_offload = False
    connector._can_store = True
    connector._connector_metadata = None
    connection = Connection(threading.Event())
    connector._prepare_worker(connection)
    connector.connection = connection
    return connector, stores


def _metadata(step: int, *stores: str, last: str = "", ended: str = "") -> Any:
    from deployments.engine.stores import StepNotes

    notes = StepNotes(step, frozenset(last), frozenset(ended))
    return SimpleNamespace(stores=stores, notes=notes, need_flush_before_forward=False)


def _older_runner(connector: Any, metadata: Any, error: BaseException | None = None) -> Any:
    """A step as vLLM's first GPU runner has it: with the connector in a ``finally``."""
    connector.bind_connector_metadata(metadata)
    try:
        if error is not None:
            raise error
    finally:
        connector.wait_for_save()
        finished = connector.get_finished(set())
        connector.clear_connector_metadata()
    return finished


def _newer_runner(connector: Any, metadata: Any, error: BaseException | None = None) -> Any:
    """As its second one has it: what comes after the forward pass is left out if that breaks."""
    connector.bind_connector_metadata(metadata)
    if error is not None:
        raise error
    connector.wait_for_save()
    finished = connector.get_finished(set())
    connector.clear_connector_metadata()
    return finished


@pytest.mark.parametrize("run", [_older_runner, _newer_runner])
def test_what_a_broken_step_computed_is_not_stored_nor_what_builds_on_it(
    monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """With asynchronous scheduling the next step of the same prompt is under way already."""
    connector, stores = _worker(monkeypatch)
    run(connector, _metadata(0, "r"))
    assert len(stores) == 1
    for error in (SystemExit(), RuntimeError("out of memory")):
        with pytest.raises(type(error)):
            run(connector, _metadata(1, "r"), error)
    run(connector, _metadata(2, "r"))
    assert len(stores) == 1


@pytest.mark.parametrize("run", [_older_runner, _newer_runner])
def test_a_step_that_did_not_come_to_the_connector_counts_as_broken(
    monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    connector, stores = _worker(monkeypatch)
    run(connector, _metadata(0, "r"))
    run(connector, _metadata(2, "r"))
    assert len(stores) == 1


def test_a_step_waits_for_the_stores_of_prompts_that_end_in_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that waits holds up all turns of its engine."""
    import threading

    connector, stores = _worker(monkeypatch)
    # Nobody answers these, and nobody waits.
    _newer_runner(connector, _metadata(0, "a", "b"))
    _newer_runner(connector, _metadata(1, "a"))
    done = threading.Thread(
        target=_newer_runner, args=(connector, _metadata(2, "a", last="a")), daemon=True
    )
    done.start()
    # Of "a" all have to be there, also those of earlier steps.
    for store in (stores[3], stores[2]):
        store.set_result(True)
        done.join(0.2)
        assert done.is_alive()
    stores[0].set_result(True)
    done.join(30)
    assert not done.is_alive()


def test_blocks_are_kept_until_every_store_of_their_request_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LMCache's own account is of a request's last store; the server answers in any order."""
    connector, stores = _worker(monkeypatch)
    _newer_runner(connector, _metadata(0, "a", "b"))
    _newer_runner(connector, _metadata(1, "a"))
    stores[1].set_result(True)
    stores[2].set_result(True)
    assert _newer_runner(connector, _metadata(2, ended="ab")) == ({"b"}, set())
    # A server that is only silent may still read them.
    connector.worker_adapter.is_healthy = False
    assert _newer_runner(connector, _metadata(3)) == (set(), set())
    stores[0].set_result(True)
    assert _newer_runner(connector, _metadata(4)) == ({"a"}, set())
    assert _newer_runner(connector, _metadata(5)) == (set(), set())


def test_a_server_that_is_gone_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _ = _worker(monkeypatch)
    _newer_runner(connector, _metadata(0, "a"))
    connector.connection.losses += 1
    assert _newer_runner(connector, _metadata(1, ended="a")) == ({"a"}, set())


def test_a_store_that_is_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's server only logs an error of its own."""
    from deployments.engine.stores import FORGOTTEN_S, Stores

    connector, _ = _worker(monkeypatch)
    now_s = [0.0]
    connector._stores = Stores(lambda: 0, lambda: now_s[0])
    _newer_runner(connector, _metadata(0, "a"))
    assert _newer_runner(connector, _metadata(1, ended="a")) == (set(), set())
    now_s[0] += FORGOTTEN_S
    assert _newer_runner(connector, _metadata(2)) == ({"a"}, set())


def test_blocks_that_change_hands_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is preempted gives up its blocks at once."""
    import threading

    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    monkeypatch.setattr(LMCacheMPConnector, "handle_preemptions", lambda self, metadata: None)
    connector, stores = _worker(monkeypatch)
    _newer_runner(connector, _metadata(0, "a"))
    connector.handle_preemptions(_metadata(1))
    flushing = _metadata(2)
    flushing.need_flush_before_forward = True
    done = threading.Thread(target=connector.handle_preemptions, args=(flushing,), daemon=True)
    done.start()
    done.join(0.2)
    assert done.is_alive()
    stores[0].set_result(True)
    done.join(30)
    assert not done.is_alive()


def test_a_load_whose_connection_broke_fails_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU LMCache's future raises when it is asked."""

    class Broken:
        def query(self) -> bool:
            raise TimeoutError("the connection to the LMCache server is lost")

    connector, _ = _worker(monkeypatch)
    connector.worker_adapter.retrieve_futures["r"] = (Broken(), [1, 2])
    assert _newer_runner(connector, _metadata(0)) == (set(), {"r"})


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_workers_are_told_whose_prompt_ends_and_whose_blocks_are_kept(role: str) -> None:
    """A prompt of three chunks in two steps; others store nothing, or are preempted."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    connector, _ = _decoder(LateServer(0))
    connector._can_store, connector._parks = True, role == "kv_both"
    connector._save_decode_cache = False
    connector._group_tokens_per_block = [128]
    connector._dcp_size = 1
    connector._report_block_allocation_deltas = lambda output: None
    requests = {}
    for name in "abc":
        requests[name] = request = _request(390 if name != "b" else 100, park=True)
        request.request_id = name
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        connector.request_trackers[name].append_block_ids(([1, 2, 3, 4],))

    def step(scheduled: dict[str, int], new: str, preempted: str = "") -> Any:
        cached = [one for one in scheduled if one not in new]
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=one, num_computed_tokens=0) for one in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached,
                new_block_ids=[None] * len(cached),
                resumed_req_ids=set(),
                num_computed_tokens=[0] * len(cached),
            ),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=set(preempted),
        )
        return connector.build_connector_meta(output).notes

    assert issubclass(type(connector), LMCacheMPConnector)
    first = step({"a": 256, "b": 100, "c": 256}, "abc")
    second = step({"a": 134}, "", preempted="c")
    assert (first.last, second.last) == (frozenset(), frozenset("a"))
    kept = {}
    for name, request in requests.items():
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_STOPPED
        kept[name] = connector.request_finished(request, [])[0]
    # Of "b" nothing was stored; from "c" the blocks were taken before.
    assert kept == {"a": True, "b": False, "c": False}
    third, fourth = step({}, ""), step({}, "")
    assert (third.ended, fourth.ended) == (frozenset("a"), frozenset())
    assert [one.step for one in (first, second, third, fourth)] == [0, 1, 2, 3]
