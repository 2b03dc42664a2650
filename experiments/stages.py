"""Measures what running answers feel of others' images, encoded in steps or beside them.

Applications of one engine each, one for each ``engine_scheduler``, are up at the same time. Their
model has random weights, and a tower that takes about half a second for a screenshot on one core.
In each round, through each application in random order, agents stream long answers. Beside them a
client sends turns with a new screenshot and a long text, one after the other. Reported are the
streams' times between tokens from the first of these turns to the last one's first token, these
turns' own time to first token, and whether all answers are those of the first application. Ratios
compare with the first application in the same round; their median and quartiles are given.

``--out`` also gets a picture of the first two applications, in the round in which the first one's
longest gap is the median. An engine tells how long stages took. In the picture a turn's prefill
ends with its first token, and begins when its encode ends.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp

from conserve_lab.peers.plan import CONVERSATION_HEADER
from experiments.agents import MODEL, Answer, Message, ask, clients, end, gaps_between, words
from experiments.harness import Experiment, figure, percentile, ratio_quartiles, rounds
from experiments.seeing import model, screenshot
from tests.engines.vision.model import Tower

SCHEDULERS = ("conversation", "conversation_lane", "vllm")
# On one core of 2020's it takes about half a second of five tiles.
_TOWER = Tower(hidden=384, layers=12, heads=6, tile_pixels=224, patch_pixels=14, scale=4)
# In float32, so that chunks of other sizes give the same tokens.
_SETTINGS = ("engine.dtype=float32", "engine.max_model_len=8192", f"served_model_name={MODEL}")
_PORT = 8000
_ANSWER_TOKENS = 8
# Streams run alone for so long before the first screenshot comes.
_CALM_S = 0.5
# Okabe and Ito's colours.
_DECODE, _ENCODE, _PREFILL = "#0072B2", "#D55E00", "#009E73"


@dataclass(frozen=True, slots=True)
class Looked:
    """A turn with a screenshot; times are in seconds, and none is known of stages in steps.

    Attributes:
        sent_s, first_s: when it was sent, and its first token came, by the round's clock.
    """

    sent_s: float
    first_s: float
    encode_wait_s: float
    encode_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """One round through one application; times in seconds, from the first screenshot on.

    Attributes:
        gaps_s: the streams' times between tokens while a turn with a screenshot had no token yet.
        arrivals_s: when each stream's tokens came.
        answers: the streams' texts, and then the others'.
    """

    gaps_s: list[float]
    arrivals_s: list[list[float]]
    turns: list[Looked]
    answers: list[str]

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s)

    @property
    def p95_s(self) -> float:
        return percentile(self.gaps_s, 0.95)

    @property
    def ttft_s(self) -> float:
        return median(turn.first_s - turn.sent_s for turn in self.turns)


async def look(
    session: aiohttp.ClientSession, url: str, name: str, text_words: int
) -> tuple[Answer, Mapping[str, float]]:
    """Have a turn with a new screenshot answered; returns its last turn's account, too."""
    rng = random.Random(name)
    said: list[Any] = [{"type": "text", "text": words(rng, text_words)},
                       {"type": "image_url", "image_url": {"url": screenshot(rng)}}]  # fmt: skip
    messages: list[Any] = [{"role": "user", "content": said}]
    answer = await ask(session, url, messages, _ANSWER_TOKENS, {CONVERSATION_HEADER: name})
    async with session.get(f"{url}/v1/conversations/{name}") as response:
        account: Mapping[str, float] = (await response.json())["last_turn"]
    await end(session, url, name)
    return answer, account


async def play(session: aiohttp.ClientSession, url: str, name: str, options: Any) -> Seen:
    """Have streams answered, and turns with screenshots beside them.

    Raises:
        RuntimeError: a stream has ended before the last of these turns.
    """
    names = [f"{name}-stream-{number}" for number in range(options.streams)]
    streams = [Answer() for _ in names]
    tasks = []
    for own, answer in zip(names, streams, strict=True):
        messages: list[Message] = [{"role": "user", "content": words(random.Random(own), 100)}]
        asking = ask(session, url, messages, options.tokens, {CONVERSATION_HEADER: own},
                     answer=answer)  # fmt: skip
        tasks.append(asyncio.create_task(asking))
    while not all(answer.arrivals_s for answer in streams):
        await asyncio.sleep(0.02)
        for task in tasks:
            if task.done():
                task.result()
    await asyncio.sleep(_CALM_S)
    looked = [
        await look(session, url, f"{name}-image-{number}", options.words)
        for number in range(options.images)
    ]
    if any(task.done() for task in tasks):
        raise RuntimeError("a stream ended before the last screenshot's turn: set more --tokens")
    await asyncio.gather(*tasks)
    for own in names:
        await end(session, url, own)
    from_s = looked[0][0].sent_s
    turns = [
        Looked(
            answer.sent_s - from_s, answer.arrivals_s[0] - from_s,
            *(account[f"{stage}_s"] for stage in ("encode_wait", "encode", "prefill")),
        )
        for answer, account in looked
    ]  # fmt: skip
    return Seen(
        gaps_between(streams, from_s, looked[-1][0].arrivals_s[0]),
        [[at_s - from_s for at_s in answer.arrivals_s] for answer in streams],
        turns,
        [answer.text for answer in (*streams, *(answer for answer, _ in looked))],
    )


async def measure(experiment: Experiment, urls: Mapping[str, str]) -> dict[str, list[Seen]]:
    """Go through the applications, round after round, after one that does not count."""
    options = experiment.options
    seen: dict[str, list[Seen]] = {scheduler: [] for scheduler in urls}
    async with clients() as session:
        order = rounds(urls, options.rounds, options.seed, warm_up=1)
        for number, scheduler in experiment.track(order, "rounds"):
            one = await play(session, urls[scheduler], f"{options.seed}-{number}", options)
            if number >= 0:
                seen[scheduler].append(one)
    return seen


def report(seen: dict[str, list[Seen]], experiment: Experiment) -> None:
    """Print a table with ratios to the first application."""
    base = next(iter(seen.values()))
    rows = []
    for scheduler, mine in seen.items():
        row = [scheduler]
        for figures in ("longest_s", "p95_s", "ttft_s"):
            own, theirs = ([getattr(one, figures) for one in ones] for ones in (mine, base))
            ratio = "" if mine is base else ratio_quartiles(own, theirs)
            row += [f"{1000 * median(own):.0f}", ratio]
        encode_s = median(turn.encode_s for one in mine for turn in one.turns)
        same = sum(one.answers == other.answers for one, other in zip(mine, base, strict=True))
        row += [f"{1000 * encode_s:.0f}" if encode_s else "-", f"{same} of {len(mine)}"]
        rows.append(row)
    columns = ["engine_scheduler", "longest gap", "ratio", "p95", "ratio"]
    columns += ["image's TTFT", "ratio", "encode", "same answers"]
    title = f"{experiment.options.streams} streams beside images, medians of rounds, milliseconds"
    experiment.show(title, columns, rows)


def draw(seen: Mapping[str, Seen]) -> Any:
    """Return a picture of a round through each application: tokens, and what is beside them."""
    from matplotlib.patches import Patch

    picture = figure(10, 1 + 1.7 * len(seen))
    panels = picture.subplots(len(seen), 1, sharex=True, squeeze=False)[:, 0]
    lanes = ["prefill", "encode"]
    for axes, (scheduler, one) in zip(panels, seen.items(), strict=True):
        streams = len(one.arrivals_s)
        heights = [*range(len(lanes), len(lanes) + streams)]
        axes.eventplot(one.arrivals_s, lineoffsets=heights, linelengths=0.7, linewidths=0.6,
                       colors=_DECODE)  # fmt: skip
        for turn in one.turns:
            axes.axvspan(turn.sent_s, turn.first_s, color="#000000", alpha=0.07, linewidth=0)
            if turn.encode_s:
                prefills_s = turn.first_s - turn.prefill_s
                axes.barh(1, turn.encode_s, left=prefills_s - turn.encode_s, color=_ENCODE)
                axes.barh(0, turn.prefill_s, left=prefills_s, color=_PREFILL)
            else:
                middle_s = (turn.sent_s + turn.first_s) / 2
                axes.text(middle_s, 0.5, "in steps", ha="center", va="center", fontsize=9)
        answers = [f"answer {number + 1}" for number in range(streams)]
        axes.set_yticks([*range(len(lanes) + streams)], [*lanes, *answers])
        axes.set_title(f"engine_scheduler: {scheduler}", fontsize=10, loc="left")
        axes.set_ylim(-0.6, len(lanes) + streams - 0.4)
    ends_s = max(one.turns[-1].first_s for one in seen.values())
    panels[-1].set_xlim(-_CALM_S, ends_s + _CALM_S)
    panels[-1].set_xlabel("seconds from the first turn with an image")
    legend = [
        Patch(color=_DECODE, label="a token of a running answer"),
        Patch(color=_ENCODE, label="encode, in the lane"),
        Patch(color=_PREFILL, label="prefill, in the lane"),
        Patch(color="#000000", alpha=0.07, label="a turn with an image, until its first token"),
    ]
    picture.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return picture


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("stages", __doc__, width=120, rounds=6, seed=1)
    experiment.option("--schedulers", list(SCHEDULERS), "the first is compared with",
                      metavar="SCHEDULER")  # fmt: skip
    experiment.option("--streams", 2, "answers that are streamed")
    experiment.option("--tokens", 800, "of each of them")
    experiment.option("--images", 2, "turns with a screenshot in a round")
    experiment.option("--words", 1500, "of text in each of these turns")
    experiment.option("--model", None, "that sees; none: one of random weights", metavar="MODEL")
    options = experiment.parse(arguments)
    sees, urls = model(experiment, _TOWER), {}
    with ExitStack() as stack:
        for number, scheduler in enumerate(options.schedulers):
            own = (sees, *_SETTINGS, f"engine_scheduler={scheduler}", "lmcache.port=0")
            serving = experiment.serving(*own, prefillers=0, port=_PORT + number, name=scheduler)
            urls[scheduler] = stack.enter_context(serving)
        seen = asyncio.run(measure(experiment, urls))
    report(seen, experiment)
    experiment.save(seen)
    if path := experiment.file("png"):
        base = next(iter(seen.values()))
        number = sorted(range(len(base)), key=lambda one: base[one].longest_s)[len(base) // 2]
        drawn = {scheduler: ones[number] for scheduler, ones in list(seen.items())[:2]}
        draw(drawn).savefig(path, dpi=120)


if __name__ == "__main__":
    main()
