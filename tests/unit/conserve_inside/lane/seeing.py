"""Random conversations with images on a real engine, with its lane and without."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        plain = _play(engine, seed, size, lane=False)
        assert LANE not in encodes, "the lane has encoded without being used"
        done = engine.policy.done
        beside = _play(engine, seed, size, lane=True)
        assert encodes.count(LANE) > 5, "the lane has hardly encoded"
        assert (engine.policy.done > done) is prefills, "whether the lane has prefilled"
        both = plain.keys() & beside.keys()
        assert len(both) > 8, "few turns have stayed"
        differ = [name for name in both if beside[name] != plain[name]]
        assert not differ, f"other tokens with the lane: {differ} with seed {seed}"
        engine.require_no_leak()


def _play(engine: Engine, seed: int, size: tuple[int, int], *, lane: bool) -> dict[str, list[int]]:
    """Random conversations with images in several turns, some of whose clients leave.

    What comes when, and who leaves, is by steps: with and without a lane the same.
    """
    chance = random.Random(seed)
    begin(engine, lane)
    plan = {
        f"c{number}": [
            (
                text_of(chance.randrange(10**6), chance.choice((5, 40, 150)), images),
                [chance.randrange(8) for _ in range(images)],
                chance.randrange(2, 40),
                chance.random() < 0.2,
            )
            for images in [chance.choice((0, 1, 1, 2)) for _ in range(3)]
        ]
        for number in range(6)
    }
    texts = dict.fromkeys(plan, "")
    seen: dict[str, list[int]] = {key: [] for key in plan}
    waits = dict.fromkeys(plan, 0)
    leaves_at: dict[str, int] = {}
    stayed: dict[str, list[int]] = {}
    for step in range(6_000):
        for key, turn in list(waits.items()):
            text, images, tokens, leaves = plan[key][turn]
            texts[key] += text
            seen[key] += images
            name = f"{key}.{turn}"
            engine.add(name, texts[key], tokens, key, [image_of(one, size) for one in seen[key]])
            if leaves:
                leaves_at[name] = step + chance.randrange(1, 12)
            del waits[key]
        for name in [name for name, at in leaves_at.items() if at <= step]:
            del leaves_at[name]
            engine.abort(name)
        for name in engine.step():
            if name in leaves_at:
                del leaves_at[name]
                continue
            stayed[name] = engine.answers[name]
            key, turn_text = name.split(".")
            if int(turn_text) < 2:
                waits[key] = int(turn_text) + 1
        if not waits and not engine.scheduler.has_requests():
            break
    engine.drain()
    return stayed
