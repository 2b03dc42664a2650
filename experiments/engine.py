"""Measures what an engine's scheduler that knows conversations changes, against vLLM's own.

One engine with the embedded model, in this process, stepped by hand; between runs its scheduler is
replaced, so that all compare on the same model and KV. Times are CPU seconds of this process: other
programs on the machine do not count, and there is one thread. How fast it is differs all the same,
so what agents wait, and the ageing, are in units of a prefill of 1,000 tokens, which is measured
first. In each round, in random order:

- *Light beside heavy*: six conversations with short prompts and appends beside three with long
  ones, two calls at a time, with 4 units between turns (``--away``); a level up each 1.25 units.
  Also without ageing, as a warning: the shorter agents are away, the longer heavy ones wait.
- *Long prompts beside decodes*: three prompts of 3,000 tokens, one after the other, beside four
  answers; the times between the answers' tokens, and to the prompts' first.
- *Found again*: a history's next turn, after five other conversations have filled the KV and ended.
  Its client has said that it comes within ten seconds.
- *Nothing presses*: warm turns of one conversation alone.

Answers are greedy, and have to be the same under each scheduler.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

from conserve.wire import scheduled_turn
from experiments.harness import Experiment, percentile, ratio_quartiles, rounds

VLLM, OURS, NO_AGEING = "vllm", "conversation", "conversation, no ageing"
# The model is small, and so are its prompts: what counts as much is so, too.
_QUOTA_TOKENS = 512
# In units of a prefill of 1,000 tokens.
_AGE_UNITS, _SPREAD_UNITS = 1.25, 0.3
_BLOCK_TOKENS = 32
_BLOCKS = 800


def words(seed: int, tokens: int) -> list[int]:
    """Tokens of a prompt, the same for the same seed."""
    chance = random.Random(seed)
    return [chance.randrange(20, 900) for _ in range(tokens)]


@dataclass
class Engine:
    """One engine, whose scheduler can be replaced. Its clock is this process's CPU time, and what
    was slept through."""

    slept_s: float = 0.0
    unit_s: float = 1.0
    away_units: float = 4.0
    answers: dict[str, list[int]] = field(default_factory=dict)
    added_s: dict[str, float] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS="1",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from conserve.embedded import model_path

        torch.set_num_threads(1)
        arguments = EngineArgs(
            model=str(model_path()),
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=4096,
            num_gpu_blocks_override=_BLOCKS,
            block_size=_BLOCK_TOKENS,
            skip_tokenizer_init=True,
            seed=0,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._core = self._engine.engine_core.engine_core

    def now_s(self) -> float:
        return time.process_time() + self.slept_s

    def begin(
        self, scheduler: str, calls: int = 8, step_tokens: int = 4096, blocks: int = _BLOCKS
    ) -> None:
        """Begin anew, with an empty cache.

        Args:
            scheduler: one of those that are compared.
            calls: how many run at a time.
            step_tokens: what a step computes.
            blocks: how many of the KV's are used.
        """
        from vllm.v1.core.sched.scheduler import Scheduler

        from conserve_inside.scheduler.scheduling import conversation_scheduler

        while self._core.scheduler.has_requests():
            self._engine.step()
        before, config = self._core.scheduler, self._core.vllm_config
        config.scheduler_config.max_num_seqs = calls
        config.scheduler_config.max_num_batched_tokens = step_tokens
        config.cache_config.num_gpu_blocks = blocks
        ours = scheduler != VLLM
        config.scheduler_config.policy = "priority" if ours else "fcfs"
        age_s = 1e9 if scheduler == NO_AGEING else _AGE_UNITS * self.unit_s
        feedback = {"quota_tokens": _QUOTA_TOKENS, "age_s": age_s}
        config.additional_config = {"conserve": {"feedback": feedback}}
        kv = before.kv_cache_config
        kv.num_blocks = blocks
        made: Any = (conversation_scheduler if ours else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=before.structured_output_manager,
            block_size=before.block_size,
            hash_block_size=before.hash_block_size,
            log_stats=True,
        )
        made.clock = self.now_s
        self._core.scheduler = made
        self.answers, self.added_s, self.times_s = {}, {}, {}
        self.found = {}

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        key: str,
        last: bool = False,
        resume_s: float | None = None,
    ) -> None:
        """A conversation's turn comes."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": scheduled_turn(key, resume_s, last)},
        )  # fmt: skip
        self.added_s[name] = self.now_s()
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[str]:
        """One step; the turns that have ended with it."""
        ended = []
        for output in self._engine.step():
            name, now_s = output.request_id, self.now_s()
            self.answers[name] = list(output.outputs[0].token_ids)
            times = self.times_s.setdefault(name, [])
            times += [now_s] * (len(self.answers[name]) - len(times))
            if output.num_cached_tokens is not None:
                self.found[name] = output.num_cached_tokens
            if output.finished:
                ended.append(name)
        return ended

    def turn(
        self, name: str, prompt: Sequence[int], tokens: int, key: str, **told: Any
    ) -> list[int]:
        """Run a turn alone; returns its prompt and answer."""
        self.add(name, prompt, tokens, key, **told)
        while name not in self.step():
            pass
        return [*prompt, *self.answers[name]]

    def latency_s(self, name: str) -> float:
        """From a turn's arrival to its last token."""
        return self.times_s[name][-1] - self.added_s[name]

    def first_s(self, name: str) -> float:
        """From a turn's arrival to its first token."""
        return self.times_s[name][0] - self.added_s[name]


# --- scenes: each returns its figures by name -----------------------------------------------------


def light_beside_heavy(engine: Engine, scheduler: str) -> dict[str, float]:
    """Turns' latencies of both, in seconds."""
    engine.begin(scheduler, calls=2, step_tokens=512)
    sizes: dict[str, tuple[int, ...]] = {f"heavy{n}": (900, 500, 400) for n in range(3)}
    sizes |= {f"light{n}": (90, 40, 40, 40) for n in range(6)}
    began_s = engine.now_s()
    due = [(began_s, key, 0) for key in sizes if "heavy" in key]
    for later in range(6):
        after_s = (0.05 + _SPREAD_UNITS * later) * engine.unit_s
        due.append((began_s + after_s, f"light{later}", 0))
    history: dict[str, list[int]] = {}
    under_way = 0
    while due or under_way:
        if not under_way and min(due)[0] > engine.now_s():
            engine.slept_s += min(due)[0] - engine.now_s()
        for one in [one for one in sorted(due) if one[0] <= engine.now_s()]:
            due.remove(one)
            _, key, turn = one
            seed = sum(map(ord, key)) * 10 + turn
            history[key] = history.get(key, []) + words(seed, sizes[key][turn])
            engine.add(f"{key}.{turn}", history[key], 20, key)
            under_way += 1
        for name in engine.step():
            under_way -= 1
            key, number = name.split(".")
            history[key] = history[key] + engine.answers[name]
            if int(number) + 1 < len(sizes[key]):
                after_s = engine.away_units * engine.unit_s
                due.append((engine.now_s() + after_s, key, int(number) + 1))
    light = [engine.latency_s(name) for name in engine.answers if "light" in name]
    heavy = [engine.latency_s(name) for name in engine.answers if "heavy" in name]
    return {
        "light mean s": mean(light),
        "light longest s": max(light),
        "heavy mean s": mean(heavy),
        "heavy longest s": max(heavy),
    }


def long_beside_decodes(engine: Engine, scheduler: str) -> dict[str, float]:
    """Gaps between decodes' tokens while long prompts come in, and these prompts' TTFT."""
    engine.begin(scheduler)
    for number in range(4):
        engine.add(f"decode{number}", words(number, 64), 500, f"decode{number}")
    for _ in range(30):
        engine.step()
    from_s = engine.now_s()
    for number in range(3):
        name = f"long{number}"
        engine.add(name, words(50 + number, 3_000), 4, name)
        while name not in engine.times_s:
            engine.step()
        for _ in range(10):
            engine.step()
    to_s = engine.now_s()
    gaps_s = [
        after - before
        for number in range(4)
        for before, after in pairwise(engine.times_s[f"decode{number}"])
        if before >= from_s and after <= to_s
    ]
    firsts_s = [engine.first_s(f"long{number}") for number in range(3)]
    while len(engine.answers["decode0"]) < 500:
        engine.step()
    return {
        "gap p50 s": percentile(gaps_s, 0.5),
        "gap p95 s": percentile(gaps_s, 0.95),
        "gap longest s": max(gaps_s),
        "TTFT s": mean(firsts_s),
    }


def found_again(engine: Engine, scheduler: str) -> dict[str, float]:
    """How much of a history is found after others, and how long its turn's first token takes."""
    engine.begin(scheduler, calls=4, step_tokens=1024, blocks=101)
    history = engine.turn("mine.1", words(1, 960), 24, "mine", resume_s=10.0)
    for number in range(5):
        name = f"other{number}"
        engine.turn(name, words(10 + number, 900), 24, name, last=True)
    engine.turn("mine.2", [*history, *words(2, 64)], 24, "mine")
    # Of what can be cached: whole blocks.
    whole = (len(history) - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
    return {"found share": engine.found["mine.2"] / whole, "TTFT s": engine.first_s("mine.2")}


def nothing_presses(engine: Engine, scheduler: str) -> dict[str, float]:
    engine.begin(scheduler)
    history = engine.turn("warm", words(3, 900), 20, "mine")
    for number in range(15):
        history = engine.turn(f"mine.{number}", [*history, *words(4 + number, 50)], 20, "mine")
    return {"turn s": median(engine.latency_s(f"mine.{number}") for number in range(15))}


Scene = Callable[[Engine, str], dict[str, float]]
SCENES: dict[str, tuple[Scene, tuple[str, ...]]] = {
    "light beside heavy": (light_beside_heavy, (VLLM, OURS, NO_AGEING)),
    "long prompts beside decodes": (long_beside_decodes, (VLLM, OURS)),
    "found again": (found_again, (VLLM, OURS)),
    "nothing presses": (nothing_presses, (VLLM, OURS)),
}
# A scene's figures by scheduler and name, one a round.
Figures = dict[str, dict[str, list[float]]]


def measure(experiment: Experiment, scenes: Sequence[str]) -> dict[str, Figures]:
    """Return each scene's figures.

    Raises:
        RuntimeError: an answer is another one under another scheduler.
    """
    options, engine = experiment.options, Engine()
    engine.away_units = options.away
    engine.begin(VLLM)
    engine.turn("warm up", words(0, 500), 8, "warm up")
    engine.turn("unit", words(1, 1_000), 1, "unit")
    engine.unit_s = engine.first_s("unit")
    seen: dict[str, Figures] = {scene: {one: {} for one in SCENES[scene][1]} for scene in scenes}
    for round_number in experiment.track(range(options.rounds), "rounds"):
        for scene in scenes:
            play, schedulers = SCENES[scene]
            answers: dict[str, list[int]] | None = None
            for _, scheduler in rounds(schedulers, 1, round_number):
                figures = play(engine, scheduler)
                if answers is not None and answers != engine.answers:
                    raise RuntimeError(f"{scene}: {scheduler} gives other answers")
                answers = dict(engine.answers)
                for name, value in figures.items():
                    seen[scene][scheduler].setdefault(name, []).append(value)
    return seen


def show(seen: dict[str, Figures], experiment: Experiment) -> None:
    """Print medians over rounds, and of each round's ratio to vLLM's the median and quartiles."""
    for scene, schedulers in seen.items():
        rows = []
        for name, theirs in schedulers[VLLM].items():
            row = [name]
            for scheduler, figures in schedulers.items():
                cell = f"{median(figures[name]):.4g}"
                if scheduler != VLLM and all(theirs):
                    cell += f" (x {ratio_quartiles(figures[name], theirs)})"
                row.append(cell)
            rows.append(row)
        experiment.show(scene, ["", *schedulers], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("engine", __doc__, rounds=3)
    about = "between turns of light and heavy conversations, in prefills of 1,000 tokens"
    experiment.option("--away", 4.0, about, metavar="UNITS")
    experiment.option("--scene", None, "this one alone", choices=SCENES)
    options = experiment.parse(arguments)
    seen = measure(experiment, list(SCENES) if options.scene is None else [options.scene])
    show(seen, experiment)
    experiment.save(seen)


if __name__ == "__main__":
    main()
