"""Measures what it saves to tokenize only what is new of a prompt, by the history's length.

Histories are chats of source files (Python's standard library) with short answers between, behind a
system prompt of 20,000 characters, as coding agents have them. Each is tokenized as a whole, as
vLLM does with every turn; in pieces of which none was seen before; and in pieces when one answer
and one message of 2,000 characters have come to it. Medians of several rounds.
"""

import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from conserve.engines import model_source
from conserve.settings import EMBEDDED_MODEL
from conserve.tokenizing import TokenCache
from deployments.engine.tokenizing import cut_by
from experiments.agents import Message
from experiments.harness import Experiment

_CHARACTERS = (10_000, 40_000, 200_000, 400_000, 800_000)
_SYSTEM_CHARACTERS = 20_000
_MESSAGE_CHARACTERS = 2_000
_MOST_BYTES = 256 * 10**6


class Chats:
    """Histories, each message another part of some file."""

    def __init__(self, seed: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        self._text = "".join(file.read_text(errors="replace") for file in files)
        self._rng = random.Random(seed)

    def history(self, characters: int) -> list[Message]:
        messages = [self._message("system", _SYSTEM_CHARACTERS)]
        left = characters - _SYSTEM_CHARACTERS
        while left > 0:
            # Most of what tools say is short, some very long.
            length = min(20_000, int(self._rng.paretovariate(1.1) * 400))
            messages += [self._message("user", length), self.answer()]
            left -= length
        return messages

    def answer(self) -> Message:
        return self._message("assistant", 300)

    def question(self) -> Message:
        return self._message("user", _MESSAGE_CHARACTERS)

    def _message(self, role: str, characters: int) -> Message:
        begin = self._rng.randrange(len(self._text) - characters)
        return {"role": role, "content": self._text[begin : begin + characters]}


def _timed_s(tokenize: Callable[[str], Sequence[int]], text: str) -> tuple[float, list[int]]:
    started_s = time.perf_counter()
    ids = tokenize(text)
    return time.perf_counter() - started_s, [*ids]


def measure(tokenizer: Any, chats: Chats, characters: int, rounds: int) -> dict[str, float]:
    """Return medians in seconds, and ``tokens`` and ``pieces`` of the history.

    Raises:
        ValueError: this tokenizer's prompts cannot be cut.
        RuntimeError: tokens differ.
    """
    pieces, encode = cut_by(tokenizer)

    def text(messages: list[Message]) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    found: dict[str, list[float]] = {"rendered": [], "whole": [], "first": [], "next": []}
    for _ in range(rounds):
        history = chats.history(characters)
        longer = [*history, chats.answer(), chats.question()]
        started_s = time.perf_counter()
        now, later = text(history), text(longer)
        found["rendered"].append((time.perf_counter() - started_s) / 2)
        cache = TokenCache(pieces, encode, _MOST_BYTES)
        first_s, _ = _timed_s(cache.tokens, now)
        next_s, ids = _timed_s(cache.tokens, later)
        whole_s, all_ids = _timed_s(lambda text: encode([text])[0], later)
        if ids != all_ids:
            raise RuntimeError("pieces did not become the tokens of the whole")
        for name, took_s in (("whole", whole_s), ("first", first_s), ("next", next_s)):
            found[name].append(took_s)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"tokens": len(all_ids), "pieces": len([*pieces.of(later)]), **medians}


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("tokenizing", __doc__, rounds=9, seed=0)
    experiment.option("--model", EMBEDDED_MODEL, "a folder, or a Hugging Face id")
    options = experiment.parse(arguments)
    tokenizer = AutoTokenizer.from_pretrained(model_source(options.model))
    chats = Chats(options.seed)
    rows, everything = [], []
    for characters in experiment.track(_CHARACTERS):
        found = measure(tokenizer, chats, characters, options.rounds)
        times = [f"{found[name] * 1000:.1f}" for name in ("rendered", "whole", "first", "next")]
        saved = f"{1 - found['next'] / found['whole']:.0%}"
        rows.append((f"{found['tokens']:,.0f}", f"{found['pieces']:.0f}", *times, saved))
        everything.append(found)
    columns = ["tokens", "pieces", "template", "tokenized whole", "in pieces, none seen"]
    columns += ["in pieces, all but the newest seen", "saved"]
    title = f"{options.model}: a later turn's prompt, milliseconds"
    experiment.show(title, columns, rows, names=0)
    experiment.save(everything)


if __name__ == "__main__":
    main()
