"""Makes training examples: conversations as the chat template renders them, with answers marked."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
from tokenizers import Tokenizer

from conserve_lab.agent import Message, Schema, make_session, plain_conversation, transcript
from conserve_lab.agent.words import Split

EMBEDDED = Path(__file__).resolve().parents[2] / "conserve" / "embedded"
_ANSWER_START = "<|im_start|>assistant\n"
_ANSWER_END = "<|im_end|>"
_PLAIN_SHARE = 0.07
# Text after the end of an answer, for requests that ignore that end.
_GOING_ON = " and so on"
_GOING_ON_SHARE = {"plain": 0.4, "session": 0.04}


@dataclass(frozen=True, slots=True)
class Stage:
    """The examples of a part of the training, up to the share ``until`` of its tokens.

    The other attributes are ranges, both ends included.
    """

    until: float
    tasks: tuple[int, int]
    steps: tuple[int, int]
    schema_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and whether the model has to generate each."""

    ids: list[int]
    said: list[bool]


class Renderer:
    """The embedded model's tokenizer and chat template."""

    def __init__(self, directory: Path = EMBEDDED) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._end: int = self.tokenizer.token_to_id(_ANSWER_END)
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        # Transformers and vLLM render it like this.
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string((directory / "chat_template.jinja").read_text())

    def text(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, answering: bool = False
    ) -> str:
        """Return the conversation; with ``answering``, up to the model's next answer."""
        return self._template.render(
            messages=messages, tools=list(tools) or None, add_generation_prompt=answering
        )

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def example(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> Example:
        """Return a whole conversation, with the assistant's messages and their ends marked."""
        ids: list[int] = []
        said: list[bool] = []
        # Neither mark is ever part of a longer token, so parts can be encoded one by one.
        before, *answers = self.text(messages, tools).split(_ANSWER_START)
        self._extend(ids, said, before, False)
        for part in answers:
            answer, end, rest = part.partition(_ANSWER_END)
            self._extend(ids, said, _ANSWER_START, False)
            self._extend(ids, said, answer + end, True)
            self._extend(ids, said, rest, False)
        return Example(ids, said)

    def going_on(self, example: Example, times: int) -> Example:
        """Return a conversation in which the last answer's end is ignored."""
        last = len(example.ids) - example.ids[::-1].index(self._end)
        ids, said = example.ids[:last], example.said[:last]
        self._extend(ids, said, _GOING_ON * times, True)
        return Example(ids, said)

    def _extend(self, ids: list[int], said: list[bool], text: str, marked: bool) -> None:
        found = self.ids(text)
        ids += found
        said += [marked] * len(found)


def examples(renderer: Renderer, stage: Stage, split: Split, seed: str) -> Iterator[Example]:
    """Yield endless examples of a stage."""
    rng = random.Random(seed)
    for number in range(2**62):
        kind = "plain" if rng.random() < _PLAIN_SHARE else "session"
        if kind == "plain":
            example = renderer.example(plain_conversation(rng))
        else:
            # Most are short, as the model learns what stands outside the schemas.
            low, high = stage.schema_tokens
            length = round(low * (high / low) ** rng.random())
            session = make_session(
                f"{seed}/{number}",
                split,
                tasks=rng.randint(*stage.tasks),
                steps=stage.steps,
                schema_tokens=(length, length),
            )
            example = renderer.example(transcript(session), session.schemas)
        if rng.random() < _GOING_ON_SHARE[kind]:
            example = renderer.going_on(example, rng.randint(4, 30))
        yield example


def batches(
    source: Iterator[Example], tokens: int, pool: int, rng: random.Random
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of about ``tokens`` tokens, each of examples of similar length.

    Inputs and targets are padded on the right; a target is -1 where nothing is learnt.
    """
    while True:
        drawn = sorted((next(source) for _ in range(pool)), key=lambda example: len(example.ids))
        groups: list[list[Example]] = [[]]
        for example in drawn:
            if groups[-1] and len(example.ids) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(example)
        rng.shuffle(groups)
        yield from map(_padded, groups)


def _padded(group: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    # A multiple of 64, so that few different shapes occur.
    width = -(-(max(len(example.ids) for example in group) - 1) // 64) * 64
    inputs = np.zeros((len(group), width), np.int64)
    targets = np.full((len(group), width), -1, np.int64)
    for row, example in enumerate(group):
        ids, said = np.array(example.ids), np.array(example.said)
        inputs[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = np.where(said[1:], ids[1:], -1)
    return inputs, targets
