"""What iterations take, as the engine's core meters it."""

from types import SimpleNamespace
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData

from conserve.placement import Step
from conserve.wire import FAILED_IMAGES, STEPS
from deployments.engine.step_meter import StepMeter, StepStats


def scheduled(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    *,
    images: dict[str, list[int]] | None = None,
    encoded: dict[str, list[int]] | None = None,
    finished: set[str] | None = None,
) -> Any:
    """An iteration; by request, the tokens that it computes and those before them.

    Args:
        images: new requests' images, by the number of their embeddings.
        encoded: numbers of images that are encoded.
    """
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens={name: tokens for name, (tokens, _) in (new | cached).items()},
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name,
                num_computed_tokens=before,
                mm_features=[
                    SimpleNamespace(mm_position=PlaceholderRange(offset=0, length=tokens))
                    for tokens in (images or {}).get(name, [])
                ],
            )
            for name, (_, before) in new.items()
        ],
        scheduled_encoder_inputs=encoded or {},
        finished_req_ids=finished or set(),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(cached),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * len(cached),
            num_computed_tokens=[before for _, before in cached.values()],
            num_output_tokens=[1] * len(cached),
        ),
    )


def test_prefills_are_told_of_at_once_and_by_their_pairs_of_tokens() -> None:
    meter = StepMeter()
    meter.began(scheduled({"a": (500, 0), "b": (10, 4000)}, {"c": (1, 700), "d": (1, 300)}), 10.0)
    assert meter.ended(10.5) == [Step(0.5, 510, 500 * 500 + 10 * 8010, 2, 1000)]
    # The rest of a prompt, or one that was preempted.
    meter.began(scheduled(cached={"a": (200, 500)}), 11.0)
    assert meter.ended(11.25) == [Step(0.25, 200, 200 * 1200)]


def test_decodes_are_told_of_together_by_their_number_and_without_accidents() -> None:
    meter = StepMeter()
    told: list[Step] = []
    now_s = 10.0
    for lasted_s in (0.02, 0.02, 0.2, 0.02, 0.02):
        meter.began(scheduled(cached={"a": (1, 100), "b": (1, 300)}), now_s)
        now_s += lasted_s
        told += meter.ended(now_s)
    (step,) = told
    assert (round(step.lasted_s, 6), step.decodes, step.kv_tokens, step.count) == (0.02, 2, 400, 5)


def test_with_two_under_way_the_second_begins_when_the_first_is_over() -> None:
    meter = StepMeter()
    meter.began(scheduled({"a": (500, 0)}), 10.0)
    meter.began(scheduled(cached={"a": (300, 500)}), 10.1)
    assert [one.lasted_s for one in meter.ended(12.0)] == [2.0]
    assert [one.lasted_s for one in meter.ended(12.5)] == [0.5]


def test_images_count_in_the_iteration_that_encodes_them() -> None:
    meter = StepMeter()
    # The second image of a long prompt comes with a later chunk.
    meter.began(scheduled({"a": (500, 0)}, images={"a": [64, 80]}, encoded={"a": [0]}), 10.0)
    assert meter.ended(11.0) == [Step(1.0, 500, 500 * 500, encoded_tokens=64)]
    meter.began(scheduled(cached={"a": (1, 500)}, encoded={"a": [1]}), 11.0)
    # One that computes a single token besides is told of by itself, too.
    assert meter.ended(12.0) == [Step(1.0, 0, 0, 1, 500, encoded_tokens=80)]
    meter.began(scheduled(cached={"a": (100, 501)}, finished={"a"}), 12.0)
    assert [one.encoded_tokens for one in meter.ended(13.0)] == [0]


def test_workers_failures_come_with_the_iterations_that_the_scheduler_tells_of() -> None:
    worker = StepStats({FAILED_IMAGES: ["one"]})
    assert not worker.is_empty()
    both = worker.aggregate(StepStats({STEPS: [[0.5]], FAILED_IMAGES: ["two"]}))
    assert (both.data[STEPS], both.data[FAILED_IMAGES]) == ([[0.5]], ["one", "two"])


def test_what_is_no_computation_is_not_told_of() -> None:
    meter = StepMeter()
    meter.began(scheduled(), 10.0)
    assert meter.ended(11.0) == meter.ended(12.0) == []


def test_with_speculation_a_few_tokens_are_a_decode() -> None:
    meter = StepMeter(decode_tokens=4)
    meter.began(scheduled({"p": (100, 0)}, {"a": (4, 50)}), 10.0)
    (step,) = meter.ended(11.0)
    assert (step.new_tokens, step.decodes) == (100, 1)


def test_vllms_own_loggers_take_what_is_added() -> None:
    stats = StepStats({STEPS: [[0.5, 1]]})
    assert not stats.is_empty()
    assert StepStats().is_empty()
    logging = KVConnectorLogging(None)
    logging.connector_cls = _Connector
    said: list[Any] = []
    for _ in range(3):
        logging.observe(stats.data)
    logging.log(lambda *given: said.append(given))
    assert not said


class _Connector:
    @staticmethod
    def build_kv_connector_stats(data: dict[str, Any]) -> Any:
        return LMCacheMPConnector.build_kv_connector_stats(data)
