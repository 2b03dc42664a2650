"""Measures what images cost: the streams beside them, and the agents that send them.

Two parts, with a model that sees, of random weights:

- ``streams``: agents stream answers, turn after turn. Beside them a client sends the largest body
  of images over and over: one image or 32, the same or others each time.
- ``agents``: an agent sends a screenshot with each turn; then a second one, whose text is another
  one, sends the same screenshots. Once with the node's memory for encoded images, and once without.
  The model's tower is a larger one, and its engines' own caches have room for a few screenshots, as
  with the screenshots and the towers of real models.
"""

import asyncio
import base64
import io
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from PIL import Image, ImageDraw

from conserve.apis import CHAT
from conserve.settings import MediaSettings
from experiments.agents import MODEL, Agent, ask, clients, end, words
from experiments.harness import Experiment, median_interval, percentile, rounds
from experiments.unkind import Unkind, sending
from tests.engines.vision.model import LARGE, Tower, make_vision_model

NONE = "none"
PARTS = ("streams", "agents")
_CAPACITY = ("engine.max_model_len=8192", f"served_model_name={MODEL}")
# Where in a picture's base64 its pixels differ from one request to the next.
_VARIES_AT = 4096
_SCREEN = 448
# Room for six of the screenshots in an engine's own cache.
_STEP_TOKENS = 512


def model(experiment: Experiment, tower: Tower) -> str:
    """Return the setting of a model that sees: the one that is given, or one that is made now."""
    if experiment.options.model is not None:
        return f"model={experiment.options.model}"
    folder: Path = experiment.logs / f"model-{tower.hidden}"
    if not folder.exists():
        make_vision_model(folder, tower)
    return f"model={folder}"


# --- Streams beside the largest bodies ------------------------------------------------------------


def picture(most_bytes: int, seed: int) -> bytes:
    """Return an image of noise, any byte of whose pixels may be another one."""
    side = math.isqrt(most_bytes // 3) - 4
    file = io.BytesIO()
    noise = random.Random(seed).randbytes(3 * side * side)
    Image.frombytes("RGB", (side, side), noise).save(file, "BMP")
    return file.getvalue()


def largest(images: int, *, new: bool, most_bytes: int = MediaSettings().bytes) -> Unkind:
    """Return a turn with as many bytes of images as one may have.

    Args:
        new: whether no two requests have the same images.
    """
    start, content = b"base64,", []
    for seed in range(images):
        data = base64.b64encode(picture(most_bytes // images, seed)).decode()
        url = f"data:image/bmp;base64,{data}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    raw = json.dumps(body).encode()
    varies, at = [], raw.find(start)
    while new and at >= 0:
        varies.append(at + len(start) + _VARIES_AT)
        at = raw.find(start, varies[-1])
    return Unkind(CHAT, raw, varies)


@dataclass
class Gaps:
    """Times between tokens of streams beside one kind of body; seconds, a number a round."""

    p50_s: list[float] = field(default_factory=list)
    p95_s: list[float] = field(default_factory=list)
    longest_s: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def add(self, gaps_s: Sequence[float]) -> None:
        self.p50_s.append(median(gaps_s))
        self.p95_s.append(percentile(gaps_s, 0.95))
        self.longest_s.append(max(gaps_s))


async def _gaps(agents: Sequence[Agent], seconds: float) -> list[float]:
    gaps_s: list[float] = []
    ends_s = time.monotonic() + seconds

    async def turns(agent: Agent) -> None:
        while time.monotonic() < ends_s:
            gaps_s.extend((await agent.warm_turn()).gaps_s)

    await asyncio.gather(*(turns(agent) for agent in agents))
    return gaps_s


async def beside(experiment: Experiment, url: str, kinds: dict[str, Unkind]) -> dict[str, Gaps]:
    """Go through the kinds, round after round."""
    options = experiment.options
    seen = {name: Gaps() for name in (NONE, *kinds)}
    async with clients(timeout_s=300) as session:
        agents = [Agent(session, url, f"{options.seed}-{n}") for n in range(options.streams)]
        await _gaps(agents, options.seconds)
        for _, name in experiment.track(rounds(seen, options.rounds, options.seed)):
            if name == NONE:
                seen[name].add(await _gaps(agents, options.seconds))
                continue
            async with sending(url, kinds[name], 1, seen[name].answers):
                seen[name].add(await _gaps(agents, options.seconds))
    return seen


def show_streams(experiment: Experiment, seen: dict[str, Gaps]) -> None:
    rows = []
    for name, one in seen.items():
        pairs = zip(one.p95_s, seen[NONE].p95_s, strict=True)
        more, low, high = (1000 * value for value in median_interval([a - b for a, b in pairs]))
        change = ("", "") if name == NONE else (f"{more:+.1f}", f"{low:+.1f} to {high:+.1f}")
        times = (one.p50_s, one.p95_s, one.longest_s)
        cells = [f"{1000 * median(values):.1f}" for values in times]
        answers = ", ".join(f"{count} of {what}" for what, count in one.answers.most_common(3))
        rows.append((name, *cells, *change, answers))
    columns = ("beside", "p50", "p95", "longest", "p95 more than with none", "95 %", "answers")
    experiment.show("others' time between tokens, milliseconds", columns, rows)


# --- An agent that sends screenshots --------------------------------------------------------------


def screenshot(rng: random.Random) -> str:
    """Draw a screen like no other, as a URL."""
    screen = Image.new("RGB", (_SCREEN, _SCREEN), "white")
    draw = ImageDraw.Draw(screen)
    for _ in range(40):
        x, y = rng.randrange(_SCREEN - 60), rng.randrange(_SCREEN - 40)
        colour = tuple(rng.randrange(256) for _ in range(3))
        draw.rectangle((x, y, x + rng.randrange(60), y + rng.randrange(40)), colour)
    file = io.BytesIO()
    screen.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@dataclass
class Seen:
    """Times to first token, in seconds, of two agents that send the same screenshots."""

    first_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)


async def play(
    session: aiohttp.ClientSession, url: str, name: str, screens: Sequence[str]
) -> list[float]:
    """Have an agent send the screens, one a turn; returns each turn's time to first token."""
    rng, times = random.Random(name), []
    messages: list[Any] = [{"role": "system", "content": words(rng, 200)}]
    for screen in screens:
        said = [{"type": "text", "text": words(rng, 10)},
                {"type": "image_url", "image_url": {"url": screen}}]  # fmt: skip
        messages.append({"role": "user", "content": said})
        answer = await ask(session, url, messages, 8, {"X-Conversation-Id": name})
        messages.append({"role": "assistant", "content": answer.text})
        times.append(answer.ttft_s)
    await end(session, url, name)
    return times


async def agents(experiment: Experiment, url: str) -> Seen:
    options, found = experiment.options, Seen()
    async with clients(timeout_s=300) as session:
        for number in experiment.track(range(-1, options.rounds), "agents"):
            rng = random.Random(f"{options.seed} {number}")
            screens = [screenshot(rng) for _ in range(options.turns)]
            first, again = [
                await play(session, url, f"{options.seed}-{number}-{who}", screens)
                for who in ("first", "again")
            ]
            if number >= 0:
                found.first_s += first
                found.again_s += again
    return found


def show_agents(experiment: Experiment, found: dict[float, Seen]) -> None:
    rows = []
    for size, seen in found.items():
        cells = [f"{1000 * percentile(times, q):.0f}" for times in (seen.first_s, seen.again_s)
                 for q in (0.5, 0.95)]  # fmt: skip
        rows.append((f"{size:g}", *cells))
    columns = ("media.encoded_gb", "new, p50", "p95", "seen before, p50", "p95")
    experiment.show("time to first token of a turn with a screenshot, milliseconds", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("seeing", __doc__, width=120, rounds=6, seed=1)
    experiment.option("--parts", list(PARTS), "only these", choices=PARTS, metavar="PART")
    experiment.option("--seconds", 6.0, "of each kind of body in each round")
    experiment.option("--streams", 2)
    experiment.option("--turns", 10, "of an agent with screenshots")
    experiment.option("--model", None, "that sees; none: one of random weights", metavar="MODEL")
    options = experiment.parse(arguments)
    found: dict[str, Any] = {}
    if "streams" in options.parts:
        kinds = {
            f"{count} {'new' if new else 'known'} image{'s' * (count > 1)}": largest(count, new=new)
            for count in (1, 32) for new in (False, True)
        }  # fmt: skip
        with experiment.serving(model(experiment, Tower()), *_CAPACITY) as url:
            gaps = asyncio.run(beside(experiment, url, kinds))
        show_streams(experiment, gaps)
        # `asdict` would make other counters of the answers.
        found["streams"] = {name: vars(one) for name, one in gaps.items()}
    if "agents" in options.parts:
        found["agents"] = {}
        for size in (MediaSettings().encoded_gb, 0.0):
            own = (f"media.encoded_gb={size}", f"engine.max_num_batched_tokens={_STEP_TOKENS}")
            with experiment.serving(model(experiment, LARGE), *_CAPACITY, *own) as url:
                found["agents"][size] = asyncio.run(agents(experiment, url))
        show_agents(experiment, found["agents"])
    experiment.save(found)


if __name__ == "__main__":
    main()
