"""Measures what others feel of a large append that is prefilled at home, or by elastic placement.

One application with elastic placement (one prefiller, one decoder, float32, 512 tokens in a step),
and before it two routers, one of which never asks where a turn that appends much is prefilled. On
the decoder others' answers are streamed all the time. In each round, through each router in random
order, a conversation that lives there, too, and has had its first turn, appends many tokens.
Reported are the others' times between tokens from when that turn is sent until its first token, the
turn's own TTFT, what its decoder took over, and whether it gave the same answer through both.
Ratios are medians over rounds, with a bootstrap interval of 95 %.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.peers.pinning import engine_processes, pin
from conserve.settings import Settings
from experiments import doors
from experiments.agents import Answer, Message, ask, clients, end, gaps_between, words
from experiments.doors import Door
from experiments.harness import Experiment, percentile, ratio_cells, rounds

HOME, WHEREVER = "at home", "wherever all wait least"
_SETTINGS = (
    "placement=elastic",
    "engine.dtype=float32",
    "engine.max_model_len=32768",
    "engine.max_num_batched_tokens=512",
)
_FIRST_TOKENS = 1_000
_ANSWER_TOKENS = 16
# Of each of the others': as many as there is room for, so that they last.
_OTHERS_TOKENS = 30_000
# New conversations go elsewhere for a while after an engine has computed much for its own.
_AGAIN_S = 5.0
_MOST_TRIES = 30


@dataclass
class Appended:
    """Turns that append much, through one router; a number a round, times in seconds.

    Attributes:
        others_p95_s, others_most_s: of the others' times between tokens meanwhile.
        taken_tokens: what the decoder took over from elsewhere.
    """

    ttft_s: list[float] = field(default_factory=list)
    others_p95_s: list[float] = field(default_factory=list)
    others_most_s: list[float] = field(default_factory=list)
    taken_tokens: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


async def say(
    session: aiohttp.ClientSession, url: str, name: str, messages: list[Message], tokens: int,
    answer: Answer | None = None,
) -> Answer:  # fmt: skip
    """Have a conversation's messages answered.

    The same prompts come through each router, and by its salt none finds what another has left.
    """
    headers = {"X-Conversation-Id": name}
    return await ask(session, url, messages, tokens, headers, answer=answer, cache_salt=name)


class Others:
    """Answers that are streamed all the time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, count: int) -> None:
        self._answers = [Answer() for _ in range(count)]
        self._tasks = []
        for number, answer in enumerate(self._answers):
            name = f"other-{number}"
            messages = [{"role": "user", "content": f"{name}: go on and on"}]
            saying = say(session, url, name, messages, _OTHERS_TOKENS, answer)
            self._tasks.append(asyncio.create_task(saying))

    async def engine(self) -> str:
        """Return where they live, once all have begun.

        Raises:
            RuntimeError: one has ended, or they are apart.
        """
        while not all(answer.arrivals_s for answer in self._answers):
            await asyncio.sleep(0.05)
            self.require_all()
        engines = {lives_on(answer) for answer in self._answers}
        if len(engines) > 1:
            raise RuntimeError("the others live on several engines; start again with fewer")
        return engines.pop()

    def require_all(self) -> None:
        """Make sure that all go on.

        Raises:
            RuntimeError: one has ended.
        """
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("an answer has come to its end; measure fewer rounds")

    def gaps_s(self, from_s: float, to_s: float) -> list[float]:
        return gaps_between(self._answers, from_s, to_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def lives_on(answer: Answer) -> str:
    """Return the engine on which an answer's conversation lives."""
    return answer.headers["x-conserve-decoder"]


async def begin(
    session: aiohttp.ClientSession, url: str, name: str, first: Message, engine: str
) -> tuple[str, Answer]:
    """Begin a conversation on an engine; returns its name, and its first answer."""
    for number in range(_MOST_TRIES):
        own = f"{name}-{number}"
        answer = await say(session, url, own, [first], _ANSWER_TOKENS)
        if lives_on(answer) == engine:
            return own, answer
        await end(session, url, own)
        await asyncio.sleep(_AGAIN_S)
    raise RuntimeError(f"of {_MOST_TRIES} conversations none came to where the others live")


async def measure(experiment: Experiment, urls: Mapping[str, str]) -> dict[str, Appended]:
    """Alternate the routers, round after round, after one that does not count."""
    options = experiment.options
    results = {name: Appended() for name in urls}
    async with clients(timeout_s=None) as session:
        others = Others(session, urls[HOME], options.others)
        try:
            order = rounds(urls, options.rounds, options.seed, warm_up=1)
            for number, name in experiment.track(order, "rounds"):
                rng = random.Random(f"{options.seed}-{number}")
                mark = f"door{list(urls).index(name)}-{number}"
                result = results[name] if number >= 0 else Appended()
                await append(
                    session, urls[name], mark, rng,
                    tokens=options.tokens, others=others, result=result,
                )  # fmt: skip
        finally:
            await others.stop()
    return results


async def append(
    session: aiohttp.ClientSession,
    url: str,
    mark: str,
    rng: random.Random,
    *,
    tokens: int,
    others: Others,
    result: Appended,
) -> None:
    """Have a conversation append ``tokens``, where the others live."""
    first = {"role": "user", "content": words(rng, _FIRST_TOKENS)}
    more = {"role": "user", "content": words(rng, tokens)}
    name, answer = await begin(session, url, mark, first, await others.engine())
    messages = [first, {"role": "assistant", "content": answer.text}, more]
    answer = await say(session, url, name, messages, _ANSWER_TOKENS)
    gaps_s = others.gaps_s(answer.sent_s, answer.arrivals_s[0])
    others.require_all()
    async with session.get(f"{url}/v1/conversations/{name}") as response:
        seen = await response.json()
    await end(session, url, name)
    result.ttft_s.append(answer.ttft_s)
    result.others_p95_s.append(percentile(gaps_s, 0.95))
    result.others_most_s.append(max(gaps_s))
    result.taken_tokens.append(int(seen["last_turn"]["lmcache_tokens"]))
    result.answers.append(answer.text)


def report(results: dict[str, Appended], experiment: Experiment) -> None:
    """Print a table with ratios to the turns that are prefilled at home."""
    home = results[HOME]
    rows = []
    for name, found in results.items():
        row = [name]
        for mine, theirs in (
            (found.others_p95_s, home.others_p95_s),
            (found.others_most_s, home.others_most_s),
            (found.ttft_s, home.ttft_s),
        ):
            row += [f"{percentile(mine, 0.5) * 1000:.1f}", *ratio_cells(mine, theirs)]
        same = sum(mine == theirs for mine, theirs in zip(found.answers, home.answers, strict=True))
        taken_tokens = percentile(found.taken_tokens, 0.5)
        rows.append([*row, f"{taken_tokens:,.0f}", f"{same} of {len(found.answers)}"])
    columns = ["prefilled", "others' p95", "ratio", "95 %", "longest", "ratio", "95 %"]
    columns += ["its TTFT", "ratio", "95 %", "taken over", "same answers"]
    tokens = experiment.options.tokens
    title = f"{tokens:,} tokens appended, medians over rounds, milliseconds"
    experiment.show(title, columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("appends", __doc__, width=150, rounds=10, seed=1, cores=True)
    experiment.option("--tokens", 8_000, "that a turn appends")
    experiment.option("--others", 4, "answers that are streamed meanwhile")
    experiment.hidden("--door", type=int)
    experiment.hidden("--home", action="store_true")
    options = experiment.parse(arguments)
    if options.door is not None:
        # A router reads `pausing` for nothing but this.
        doors.serve(options.door, Settings(placement="elastic", pausing=not options.home))
        return
    both = [Door(HOME, ("--home",)), Door(WHEREVER)]
    with doors.opened(experiment, both, *_SETTINGS) as urls:
        if options.cores is not None:
            pin(engine_processes(), [int(core) for core in options.cores])
        results = asyncio.run(measure(experiment, urls))
    report(results, experiment)
    experiment.save(results)


if __name__ == "__main__":
    main()
