"""A real engine encodes images in its lane, and prefills prompts with them there."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from conserve_inside.lane.images import EncodeEnd, LaneImages
from conserve_inside.lane.scheduler_lane import Job
from conserve_inside.lane.worker import LaneForward
from conserve_inside.policy import PrefillLane, Stages
from tests.engines.vision.model import Tower, make_vision_model
from tests.unit.conserve_inside.lane.engine import Engine, running
from tests.unit.conserve_inside.lane.playing import LANE as _LANE
from tests.unit.conserve_inside.lane.playing import begin as _begin
from tests.unit.conserve_inside.lane.playing import image_of as _image
from tests.unit.conserve_inside.lane.playing import noted_encodes, require_same_tokens
from tests.unit.conserve_inside.lane.playing import text_of as _text

_LAYERS = 5


@pytest.fixture(scope="module")
def only_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    make_vision_model(folder, Tower(layers=_LAYERS))
    with running(folder) as engine:
        yield engine


@pytest.fixture
def engine(only_engine: Engine) -> Engine:
    """It, with nothing in it."""
    _begin(only_engine, lane=True)
    return only_engine


@pytest.fixture
def encodes(engine: Engine) -> Iterator[list[str]]:
    """Names of the threads in which images are encoded, one for each call of the encoder."""
    with noted_encodes(engine) as threads:
        yield threads


def _between_layers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]
) -> None:
    """Have something done in the lane's thread before each of the encoder's layers."""
    forward = engine.thread._forward
    pauses = forward.encode

    def encode(image: Any, pause: Callable[[], None]) -> Any:
        def doing() -> None:
            do()
            pause()

        return pauses(image, doing)

    monkeypatch.setattr(forward, "encode", encode)


def _name(request_id: str) -> str:
    """A turn's name, to which vLLM appends something."""
    return request_id.partition("-")[0]


def _decode(engine: Engine, tokens: int = 80) -> None:
    engine.add("decodes", "say something long", tokens)
    for _ in range(4):
        engine.step()


def _room_for_two_images(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the encoder cache this much; an image has five tiles of 16 embeddings."""
    for name in ("cache_size", "num_free_slots", "num_freeable_slots"):
        monkeypatch.setattr(engine.scheduler.encoder_cache_manager, name, 200)


def _lone(engine: Engine, text: str, images: list[int]) -> list[int]:
    """A turn's tokens with nothing beside it, and all computed in steps."""
    _begin(engine, lane=False)
    engine.add("lone", text, 6, images=[_image(one) for one in images])
    engine.drain()
    answer = engine.answers["lone"]
    _begin(engine, lane=True)
    return answer


def test_images_are_encoded_beside_decodes_once_each_and_in_order(
    engine: Engine, encodes: list[str]
) -> None:
    turns = {"first": [1], "second": [2, 3], "another": [1]}
    texts = {name: _text(len(name), 60, len(seen)) for name, seen in turns.items()}
    lone = {name: _lone(engine, texts[name], seen) for name, seen in turns.items()}
    encodes.clear()
    done = engine.policy.done
    _decode(engine)
    for name, seen in turns.items():
        engine.add(name, texts[name], 6, images=[_image(one) for one in seen])
    order: list[str] = []
    while engine.scheduler.has_requests():
        current = engine.lane.stages.encoding
        if current is not None and _name(current) not in order:
            order.append(_name(current))
        engine.step()
    assert encodes == 3 * [_LANE]
    assert order == ["first", "second"]
    assert {name: engine.answers[name] for name in turns} == lone
    # Prompts beyond the budget went through the lane, too.
    assert engine.policy.done >= done + 3
    times = engine.times
    assert times["decodes"] == (0, 0, 0)
    assert all(times[name].encode_wait_s > 0 and times[name].prefill_s > 0 for name in turns)
    assert times["first"].encode_s > 0
    assert times["second"].encode_s > 0
    # The first turn's image is this one's.
    assert times["another"].encode_s == 0


def test_decodes_go_on_while_an_image_is_encoded_and_nothing_else_is_in_the_lane(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.thread._forward._runner
    execute, steps, had = runner.execute_model, list[str](), list[int]()
    lane, seen = engine.lane, list[tuple[Any, int]]()

    def stepping(scheduled: Any, *args: Any) -> Any:
        steps.extend(_name(one) for one in scheduled.num_scheduled_tokens)
        return execute(scheduled, *args)

    monkeypatch.setattr(runner, "execute_model", stepping)

    def look() -> None:
        had.append(steps.count("decodes"))
        seen.append((lane.policy.current, lane.policy.waiting))

    _between_layers(engine, monkeypatch, look)
    _decode(engine)
    engine.add("sees", _text(1, 20), 4, images=[_image(1)])
    engine.step()
    engine.add("reads", _text(2, 300, images=0), 4)
    engine.drain()
    assert len(had) == _LAYERS
    assert had == list(range(had[0], had[0] + _LAYERS)), "a token for each layer"
    assert {current for current, _ in seen} == {None}
    assert max(waiting for _, waiting in seen) == 1
    assert engine.ended >= {"sees", "reads"}


def test_a_client_that_leaves_ends_its_encode(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, encodes: list[str]
) -> None:
    reached: list[int] = []
    _between_layers(engine, monkeypatch, lambda: reached.append(1))
    _decode(engine)
    engine.add("leaves", _text(1, 20), 4, images=[_image(1)])
    engine.add("stays", _text(2, 20), 4, images=[_image(2)])
    while not reached:
        engine.step()
    engine.abort("leaves")
    engine.drain()
    assert "leaves" not in engine.ended
    assert "stays" in engine.ended
    assert len(encodes) == 2
    # The rest of the first encode is not computed.
    assert 1 + _LAYERS <= len(reached) <= 3 + _LAYERS
    engine.require_no_leak()


def test_an_encode_that_fails_is_done_in_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, encodes: list[str]
) -> None:
    text = _text(1, 20)
    lone = _lone(engine, text, [1])
    encodes.clear()

    def fails() -> None:
        raise RuntimeError("out of memory")

    _between_layers(engine, monkeypatch, fails)
    _decode(engine)
    engine.add("sees", text, 6, images=[_image(1)])
    engine.drain()
    assert len(encodes) == 2
    assert encodes[0] == _LANE != encodes[1]
    assert engine.answers["sees"] == lone
    engine.require_no_leak()


def test_what_the_cache_cannot_hold_together_is_encoded_in_steps(
    engine: Engine, encodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _text(1, 20, 3)
    lone = _lone(engine, text, [1, 2, 3])
    encodes.clear()
    _room_for_two_images(engine, monkeypatch)
    _decode(engine)
    engine.add("three", text, 6, images=[_image(one) for one in (1, 2, 3)])
    engine.drain()
    assert engine.answers["three"] == lone
    assert _LANE not in encodes
    engine.require_no_leak()


def test_no_image_is_evicted_for_those_of_turns_behind_it(
    engine: Engine, encodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So turns that wait for room do not encode their images again and again."""
    _room_for_two_images(engine, monkeypatch)
    _decode(engine, 120)
    # Of these prompts three have room at a time.
    for number in range(8):
        engine.add(f"sees{number}", _text(number, 600), 30, images=[_image(number)])
    engine.drain()
    assert len(engine.ended) == 9
    assert encodes == 8 * [_LANE]
    engine.require_no_leak()


def test_a_prompt_in_the_lane_keeps_the_cache_no_longer_than_its_prefill(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise others, which need the cache, could have all places among the running ones."""
    _room_for_two_images(engine, monkeypatch)
    monkeypatch.setattr(engine.scheduler, "max_num_active_reqs", 2)
    _decode(engine)
    text = _text(1, 400, 0)
    engine.add("lane", f"{text} <image> go <image> go", 4, images=[_image(1), _image(2)])
    while engine.policy.current is None:
        engine.step()
    # They begin with their text, and then need the cache; it can never hold all of their images.
    for number in range(2):
        seen = [_image(10 * number + one) for one in (3, 4, 5)]
        engine.add(f"inline{number}", f"go on {3 * ' <image> stop'}", 4, images=seen)
    engine.step()
    engine.abort("decodes")
    engine.step()
    assert [_name(one.request_id) for one in engine.scheduler.running] == ["inline0", "inline1"]
    assert engine.policy.current is not None
    engine.drain(500)
    assert engine.ended == {"lane", "inline0", "inline1"}
    engine.require_no_leak()


@pytest.mark.parametrize("prefix", [False, True])
def test_some_models_prompts_are_prefilled_in_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prefix: bool
) -> None:
    """These are models whose layers need images, too, and models that attend to whole images."""
    forward = engine.thread._forward
    model, config = forward._model, forward._config
    if prefix:
        monkeypatch.setitem(vars(config.model_config), "is_mm_prefix_lm", True)
    else:
        monkeypatch.setattr(model, "deepstack_input_embeds", [], raising=False)
    # On a GPU a wrapper that replays graphs is around the model.
    wrapper = object.__new__(CUDAGraphWrapper)
    wrapper.runnable, wrapper.is_debugging_mode = model, False
    runner = SimpleNamespace(model=wrapper, device=torch.device("cpu"), attn_groups=[[]])
    runner.get_model = functools.partial(GPUModelRunner.get_model, runner)
    assert not LaneForward(runner, config).prefills


def test_what_a_step_has_dropped_meanwhile_is_encoded_again() -> None:
    """With steps in flight the worker keeps an image, and drops it before the scheduler hears."""
    cache = EncoderCacheManager(cache_size=16)
    scheduler: Any = SimpleNamespace(
        encoder_cache_manager=cache, ec_connector=None, requests={}, clock=lambda: 0.0
    )
    images = LaneImages(scheduler, Stages(PrefillLane()))
    for name, image in {"lane": "x", "step": "x", "other": "y"}.items():
        place = PlaceholderRange(offset=0, length=16)
        feature = SimpleNamespace(identifier=image, mm_position=place)
        scheduler.requests[name] = SimpleNamespace(
            request_id=name, mm_features=[feature], num_tokens=20,
            get_num_encoder_embeds=lambda number: 16,
        )  # fmt: skip
    lane, *others = scheduler.requests.values()
    assert not images.are_ready(lane, 0)
    assert images.next() is not None
    # Two steps in flight encode the same image, and then another one in its place.
    for one in others:
        assert cache.can_allocate(one, 0, 16, 0)
        cache.allocate(one, 0)
        cache.free(one)
    images.were_freed(cache.get_freed_mm_hashes())
    assert images.next() is None
    images.hears(EncodeEnd("done", 0.1))
    assert not images.are_ready(lane, 0)
    assert cache.get_freed_mm_hashes() == ["x"]
    assert images.next() is not None
    images.hears(EncodeEnd("done", 0.1))
    assert images.are_ready(lane, 0)


def test_random_turns_have_the_same_tokens_with_the_lane_and_without(
    engine: Engine, encodes: list[str]
) -> None:
    require_same_tokens(engine, encodes)


def test_a_position_has_as_many_numbers_as_the_model_takes() -> None:
    """Three for most models, and four for HunYuan-VL."""
    numbers = 4
    forward: Any = object.__new__(LaneForward)
    places = torch.arange(numbers * 40).view(numbers, 40)
    forward._model = SimpleNamespace(get_mrope_input_positions=lambda tokens, images: (places, 0))
    forward._model_config = SimpleNamespace(uses_mrope=True, mrope_num_dims=numbers)
    forward._placed, forward._most_tokens, forward._device = None, 16, torch.device("cpu")
    found = forward._positions(Job("long", range(40), [], 0, 40), 8, 24, torch.arange(8, 24))
    assert found.equal(places[:, 8:24])
