"""LMCache's connector when the server is not there yet, or a forward pass was broken off."""

import socket
import threading
import time

import pytest

from conserve import wire


def test_an_engine_waits_for_a_server_that_starts_beside_it() -> None:
    from deployments.engine.lmcache_connector import _wait_for_server

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        with pytest.raises(RuntimeError, match=rf"no LMCache server at {host}:{port} after 0.2 s"):
            _wait_for_server(host, port, timeout_s=0.2)
        begun_s = time.monotonic()
        threading.Timer(0.5, server.listen).start()
        _wait_for_server(host, port, timeout_s=30)
        assert time.monotonic() - begun_s > 0.4


def test_a_broken_forward_pass_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls wait_for_save in a ``finally``; half-computed KV must not get out."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    from deployments.engine.lmcache_connector import ResilientMPConnector

    stores = []
    # The server is not asked at all: what counts is whether a store would begin.
    monkeypatch.setattr(LMCacheMPConnector, "wait_for_save", lambda self: stores.append(self))
    connector = object.__new__(ResilientMPConnector)
    connector.worker_adapter = type("Adapter", (), {"store_futures": {}})()
    connector._not_stored = set()

    def forward() -> None:
        try:
            raise SystemExit
        finally:
            connector.wait_for_save()

    with pytest.raises(SystemExit):
        forward()
    assert stores == []
    connector.wait_for_save()
    assert stores == [connector]


def test_a_store_is_waited_for_once_and_not_where_the_server_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step holds up all turns of its engine."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.v1.multiprocess.futures import MessagingFuture

    from deployments.engine import lmcache_connector
    from deployments.engine.lmcache_connector import ResilientMPConnector

    monkeypatch.setattr(LMCacheMPConnector, "wait_for_save", lambda self: None)
    monkeypatch.setattr(lmcache_connector, "_LOOKS_EVERY_S", 0.01)
    waits: list[str] = []

    class Store(MessagingFuture):  # type: ignore[misc, type-arg]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def wait(self, timeout: float | None = None) -> bool:
            waits.append(self.name)
            return bool(super().wait(timeout))

    lost, answered, late = Store("lost"), Store("answered"), Store("late")
    answered.set_result(True)
    adapter = type("Adapter", (), {"is_healthy": False})()
    adapter.store_futures = {"r1": lost, "r2": answered}
    connector = object.__new__(ResilientMPConnector)
    connector.worker_adapter = adapter
    connector._not_stored = set()
    connector.wait_for_save()
    assert waits == ["lost", "answered"]
    # The server is back: what it has not answered it will not.
    adapter.is_healthy = True
    adapter.store_futures = {"r1": lost, "r3": late}
    threading.Timer(0.05, lambda: late.set_result(True)).start()
    connector.wait_for_save()
    assert set(waits[2:]) == {"late"}
    # What hangs is given up after a while.
    monkeypatch.setattr(lmcache_connector, "_STORE_TIMEOUT_S", 0.05)
    adapter.store_futures = {"r1": Store("hangs")}
    connector.wait_for_save()
    waits.clear()
    connector.wait_for_save()
    assert waits == []
    assert lost not in connector._not_stored


def test_a_busy_server_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for lost, it is asked for nothing, and first prompts are computed twice."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import send_ping
    from lmcache.v1.multiprocess.futures import MessagingFuture

    from deployments.engine import lmcache_connector

    answers: list[MessagingFuture[bool]] = []

    class Client:
        def ping(self, instance_id: int | None) -> MessagingFuture[bool]:
            return answers.pop()

    client = Client()
    lmcache_connector._be_patient(client)
    late, broken = MessagingFuture(), MessagingFuture()
    answers.append(late)
    threading.Timer(0.3, lambda: late.set_result(True)).start()
    assert send_ping(client, timeout=0.01)
    # A connection that breaks ends the wait, and a server that hangs is lost after a while.
    answers.append(broken)
    threading.Timer(0.05, lambda: broken.set_exception(TimeoutError("lost"))).start()
    assert not send_ping(client, timeout=0.01)
    monkeypatch.setattr(lmcache_connector, "_PING_TIMEOUT_S", 0.05)
    answers.append(MessagingFuture())
    assert not send_ping(client, timeout=0.01)


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
    parameters = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": wire.transfer_params()}
    )
    request = Request("r", [1, 2, 3], parameters, None)
    request.status = RequestStatus.FINISHED_ABORTED
    with pytest.raises(AssertionError, match="not found"):
        LMCacheMPConnector.request_finished(connector, request, [])
    delayed, params = connector.request_finished(request, [])
    # Of an engine that stores, the worker reports each end, and the scheduler waits for that.
    assert delayed is stores
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
    from vllm.v1.request import Request, RequestStatus

    from deployments.engine.lmcache_connector import ResilientMPConnector

    asked: list[str] = []

    class Adapter:
        lmcache_tokens_per_chunk = 128

        def maybe_submit_lookup_request(self, request_id: str, **what: object) -> None:
            asked.append(request_id)

        def check_lookup_result(self, request_id: str) -> int:
            return 0

        def cleanup_lookup_result(self, request_id: str) -> None:
            pass

        def end_session(self, request_id: str) -> None:
            pass

    connector = object.__new__(ResilientMPConnector)
    connector.request_trackers = {}
    connector.lazy_offload = False
    connector.scheduler_adapter = Adapter()
    connector._can_store = role != "kv_consumer"
    connector._parks = role == "kv_both"
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
    if role == "kv_consumer":
        return
    # A decoder's blocks are free at once: its stores were waited for.
    request.status = RequestStatus.FINISHED_STOPPED
    assert connector.request_finished(request, [])[0] is (role == "kv_producer")


@pytest.mark.parametrize("parks", [True, False])
def test_nobody_waits_for_a_decoders_stores_twice(parks: bool) -> None:
    from deployments.engine.lmcache_connector import ResilientMPConnector

    class Adapter:
        finished_stores = {"earlier"}  # noqa: RUF012

        def get_finished(self, ids: set[str]) -> tuple[set[str], set[str]]:
            return ids, {"loaded"}

    connector = object.__new__(ResilientMPConnector)
    connector.worker_adapter = Adapter()
    connector.lazy_offload = False
    connector._can_store, connector._parks = True, parks
    assert connector.get_finished({"a", "b"}) == (set() if parks else {"a", "b"}, {"loaded"})
    assert connector.worker_adapter.finished_stores == (set() if parks else {"earlier"})
