"""Random conversations on a real engine, with its lane and without."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tests.unit.conserve_inside.lane.engine import Engine

# The thread's name.
LANE = "prefill-lane"


def image_of(seed: int, size: tuple[int, int] = (112, 112)) -> Image.Image:
    """An image, the same for the same seed."""
    width, height = size
    return Image.frombytes("RGB", size, random.Random(seed).randbytes(width * height * 3))


def text_of(seed: int, words: int, images: int = 1) -> str:
    """A prompt with images somewhere in it, the same for the same seed."""
    chance = random.Random(seed)
    said = [chance.choice(("red", "go", "left", "on", "stop", "seven")) for _ in range(words)]
    for _ in range(images):
        said.insert(chance.randrange(words + 1), "<image>")
    return " ".join(said)


@dataclass
class Turn:
    """A turn to come; its client leaves after some steps, or stays (None)."""

    prompt: Any
    tokens: int
    leaves_after: int | None
    images: Sequence[Any] = ()


def play(engine: Engine, plan: dict[str, list[Turn]]) -> dict[str, list[int]]:
    """Play conversations; return the answers of turns whose clients stayed.

    What comes when, and who leaves, is by steps: with and without a lane the same. A conversation
    ends with its last turn, or a client that leaves. Prompts of tokens go on with the answers.
    """
    said = {key: turns[0].prompt[:0] for key, turns in plan.items()}
    seen: dict[str, list[Any]] = {key: [] for key in plan}
    due = dict.fromkeys(plan, 0)
    leaves_at: dict[str, int] = {}
    stayed: dict[str, list[int]] = {}
    for step in range(6_000):
        for key, at in due.items():
            turn, name = plan[key][at], f"{key}.{at}"
            said[key], seen[key] = said[key] + turn.prompt, [*seen[key], *turn.images]
            engine.add(name, said[key], turn.tokens, key, seen[key])
            if turn.leaves_after is not None:
                leaves_at[name] = step + turn.leaves_after
        due = {}
        for name in [name for name, at in leaves_at.items() if at <= step]:
            del leaves_at[name]
            engine.abort(name)
        for name in engine.step():
            if leaves_at.pop(name, None) is not None:
                continue
            stayed[name] = engine.answers[name]
            key, number = name.split(".")
            if isinstance(said[key], list):
                said[key] = [*said[key], *stayed[name]]
            if int(number) + 1 < len(plan[key]):
                due[key] = int(number) + 1
        if not due and not engine.scheduler.has_requests():
            break
    engine.drain()
    return stayed


def begin(engine: Engine, lane: bool) -> None:
    """Begin anew, with nothing cached, images neither."""
    engine.begin(lane)
    # Both halves forget the images that they have.
    engine.scheduler.encoder_cache_manager.reset()
    engine.thread._forward._encoder_cache().clear()


@contextmanager
def noted_encodes(engine: Engine) -> Iterator[list[str]]:
    """Names of the threads in which images are encoded, one for each call of the encoder."""
    threads: list[str] = []
    model = engine.thread._forward._model
    encode = model.embed_multimodal

    def noted(**inputs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return encode(**inputs)

    model.embed_multimodal = noted
    yield threads
    del model.embed_multimodal


def require_same_tokens(
    engine: Engine,
    encodes: list[str],
    *,
    prefills: bool = True,
    size: tuple[int, int] = (112, 112),
    seeds: int = 3,
) -> None:
    """Make sure that random turns have the same tokens with the lane and without.

    Args:
        prefills: whether the lane prefills the model's prompts.

    Raises:
        AssertionError: some have not, or the lane was not used.
    """
    for seed in range(seeds):
        encodes.clear()
        begin(engine, lane=False)
        plain = play(engine, _with_images(seed, size))
        assert LANE not in encodes, "the lane has encoded without being used"
        done = engine.policy.done
        begin(engine, lane=True)
        beside = play(engine, _with_images(seed, size))
        assert encodes.count(LANE) > 5, "the lane has hardly encoded"
        assert (engine.policy.done > done) is prefills, "whether the lane has prefilled"
        both = plain.keys() & beside.keys()
        assert len(both) > 8, "few turns have stayed"
        differ = [name for name in both if beside[name] != plain[name]]
        assert not differ, f"other tokens with the lane: {differ} with seed {seed}"
        engine.require_no_leak()


def _with_images(seed: int, size: tuple[int, int]) -> dict[str, list[Turn]]:
    chance = random.Random(seed)

    def turn() -> Turn:
        images = chance.choice((0, 1, 1, 2))
        return Turn(
            text_of(chance.randrange(10**6), chance.choice((5, 40, 150)), images),
            chance.randrange(2, 40),
            chance.randrange(1, 12) if chance.random() < 0.2 else None,
            [image_of(chance.randrange(8), size) for _ in range(images)],
        )

    return {f"c{number}": [turn() for _ in range(3)] for number in range(8)}
