"""Measures what it saves to tokenize only what is new of a prompt, by the history's length.

    python -m experiments.tokenizing [--model FOLDER_OR_ID] [--rounds 9]

Histories are chats of source files (Python's standard library) with short answers between, behind a
system prompt of 20,000 characters, as coding agents have them. Each is tokenized as a whole, as
vLLM does with every turn; in pieces of which none was seen before; and in pieces when one answer
and one message of 2,000 characters have come to it. Medians of several rounds.
"""

import argparse
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from conserve.console import new_console
from conserve.engines import model_source
from conserve.settings import EMBEDDED_MODEL
from conserve.tokenizing import TokenCache
from deployments.engine.tokenizing import cut_by

_CHARACTERS = (10_000, 40_000, 200_000, 400_000, 800_000)
_SYSTEM_CHARACTERS = 20_000
_MESSAGE_CHARACTERS = 2_000
_MOST_BYTES = 256 * 10**6


class _Chats:
    """Histories, each message another part of some file."""

    def __init__(self, seed: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        self._text = "".join(file.read_text(errors="replace") for file in files)
        self._rng = random.Random(seed)

    def history(self, characters: int) -> list[dict[str, str]]:
        """Messages of so many characters together."""
        messages = [_message("system", self._part(_SYSTEM_CHARACTERS))]
        left = characters - _SYSTEM_CHARACTERS
        while left > 0:
            # Most of what tools say is short, some very long.
            length = min(20_000, int(self._rng.paretovariate(1.1) * 400))
            messages += [_message("user", self._part(length)), self.answer()]
            left -= length
        return messages

    def answer(self) -> dict[str, str]:
        return _message("assistant", self._part(300))

    def question(self) -> dict[str, str]:
        return _message("user", self._part(_MESSAGE_CHARACTERS))

    def _part(self, characters: int) -> str:
        begin = self._rng.randrange(len(self._text) - characters)
        return self._text[begin : begin + characters]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _timed_s(tokenize: Callable[[str], Sequence[int]], text: str) -> tuple[float, list[int]]:
    started_s = time.perf_counter()
    ids = tokenize(text)
    return time.perf_counter() - started_s, [*ids]


def measure(tokenizer: Any, chats: _Chats, characters: int, rounds: int) -> dict[str, float]:
    """Medians in seconds, and ``tokens`` and ``pieces`` of the history.

    Raises:
        ValueError: this tokenizer's prompts cannot be cut.
        RuntimeError: tokens differ.
    """
    pieces, encode = cut_by(tokenizer)

    def text(messages: list[dict[str, str]]) -> str:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def whole(text: str) -> Sequence[int]:
        return encode([text])[0]

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
        whole_s, all_ids = _timed_s(whole, later)
        if ids != all_ids:
            raise RuntimeError("pieces did not become the tokens of the whole")
        for name, took_s in (("whole", whole_s), ("first", first_s), ("next", next_s)):
            found[name].append(took_s)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"tokens": len(all_ids), "pieces": len([*pieces.of(later)]), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="a folder, or a Hugging Face id")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = new_console(least_width=100)
    tokenizer = AutoTokenizer.from_pretrained(model_source(options.model))
    chats = _Chats(options.seed)
    table = Table(title=f"{options.model}: a later turn's prompt, milliseconds")
    for column in (
        *("tokens", "pieces", "template", "tokenized whole", "in pieces, none seen"),
        *("in pieces, all but the newest seen", "saved"),
    ):
        table.add_column(column, justify="right")
    for characters in track(_CHARACTERS, "tokenizing", console=console, transient=True):
        found = measure(tokenizer, chats, characters, options.rounds)
        times = [f"{found[name] * 1000:.1f}" for name in ("rendered", "whole", "first", "next")]
        saved = f"{1 - found['next'] / found['whole']:.0%}"
        table.add_row(f"{found['tokens']:,.0f}", f"{found['pieces']:.0f}", *times, saved)
    console.print(table)


if __name__ == "__main__":
    main()
