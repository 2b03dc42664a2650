"""Tasks of two to six tool calls, each call decided by the question and the results so far.

A task asks for numbered steps: calculations, look-ups in tables, and look-ups of what an earlier
step found. So a model has to pick a tool out of many, and carry names and numbers from the question
and from results into arguments and into the answer. The tools do the arithmetic.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conserve_lab.agent.tools import (
    KIND_OF_FIELD,
    OPERATIONS,
    Call,
    Schema,
    Style,
    Toolbox,
    Value,
    distractor_schema,
)
from conserve_lab.agent.words import FIELDS, NUMBER, PLAIN, Split, draw_name, draw_number

Message = dict[str, Any]
Report = Literal["last", "all"]

MIN_STEPS, MAX_STEPS = 2, 6
MIN_SCHEMA_TOKENS, MAX_SCHEMA_TOKENS = 200, 2000
# How long a token of the schemas is with the embedded model's tokenizer.
_CHARS_PER_TOKEN = 8.8
_LARGEST = 99_999

_SYSTEM = (
    "You are a careful assistant.",
    "You are an assistant that works with tools.",
    "Work through the steps one at a time.",
    "Call one tool for each step.",
    "Do not guess, the tools know.",
    "Answer only when all steps are done.",
)
_OPENINGS = (
    "Please do these {} steps.",
    "Work through these {} steps.",
    "I need these {} steps done.",
)
_CLOSINGS: dict[Report, tuple[str, ...]] = {
    "last": ("Tell me the last result.", "What is the last result?"),
    "all": ("Tell me all results.", "What are all the results?"),
}
_LOOKUPS = ("find the {} of {}", "look up the {} of {}")
_OPERATION_WORDINGS = {
    "add": ("add {} and {}", "take the sum of {} and {}"),
    "subtract": ("take {} and subtract {}", "from {} subtract {}"),
    "multiply": ("multiply {} by {}", "take the product of {} and {}"),
    "max": ("take the larger of {} and {}", "find the larger of {} and {}"),
    "min": ("take the smaller of {} and {}", "find the smaller of {} and {}"),
}
# How often a step calculates, and how often a look-up goes on from an earlier result.
_FLAVOURS = {
    "arithmetic": (1.0, 0.0),
    "table": (0.0, 0.2),
    "chain": (0.2, 0.9),
    "mixed": (0.5, 0.5),
}


@dataclass(frozen=True, slots=True)
class Task:
    """A question with its steps in words, the calls that it takes, and what each of them returns.

    ``report`` says whether the answer gives the last result or all.
    """

    question: str
    clauses: tuple[str, ...]
    calls: tuple[Call, ...]
    results: tuple[Value, ...]
    report: Report

    @property
    def expected(self) -> tuple[Value, ...]:
        """Values that a right answer states, in order."""
        return self.results if self.report == "all" else self.results[-1:]

    @property
    def answer(self) -> str:
        """A right answer, as the embedded model is trained to give it."""
        if self.report == "last":
            return f"The answer is {_shown(self.results[-1])}."
        parts = [f"step {n} gave {_shown(v)}" for n, v in enumerate(self.results, start=1)]
        return f"All done, {', '.join(parts)}."

    def remark(self, step: int) -> str:
        """Return what the embedded model says before the call of a step, counted from 0."""
        before = f"Step {step} gave {_shown(self.results[step - 1])}. " if step else ""
        count = f"Done {step} of {len(self.calls)}."
        return f"{before}{count} Step {step + 1}, {self.clauses[step]}.\n"


@dataclass(frozen=True, slots=True)
class Session:
    system: str
    schemas: tuple[Schema, ...]
    toolbox: Toolbox
    tasks: tuple[Task, ...]


def stated(answer: str) -> tuple[Value, ...]:
    """Numbers and quoted names that an answer states, numbers of steps left out."""
    text = re.sub(r"\bstep \d+", "", answer, flags=re.IGNORECASE)
    found = re.findall(r'"([^"]*)"|(-?\d+)', text)
    return tuple(int(number) if number else name for name, number in found)


def is_right(task: Task, answer: str) -> bool:
    return stated(answer) == task.expected


def make_session(
    seed: int | str,
    split: Split,
    *,
    tasks: int = 1,
    steps: tuple[int, int] = (MIN_STEPS, MAX_STEPS),
    schema_tokens: tuple[int, int] = (MIN_SCHEMA_TOKENS, MAX_SCHEMA_TOKENS),
) -> Session:
    """Make the session of a seed; the same on every machine.

    Args:
        tasks: how many questions are asked in it.
        steps: fewest and most calls of a task.
        schema_tokens: range of the schemas' total length, as far as the tools that the tasks need
            leave a choice.
    """
    rng = random.Random(f"{split}/{seed}")
    toolbox = Toolbox(Style.draw(rng))
    made = tuple(_Maker(rng, split, toolbox).task(rng.randint(*steps)) for _ in range(tasks))
    schemas = _schemas(rng, toolbox, made, rng.randint(*schema_tokens))
    system = " ".join(rng.sample(_SYSTEM, rng.randint(1, 3)))
    return Session(system, schemas, toolbox, made)


def transcript(session: Session) -> list[Message]:
    """The session as it goes when every call and answer is right."""
    messages: list[Message] = [{"role": "system", "content": session.system}]
    for task in session.tasks:
        messages.append({"role": "user", "content": task.question})
        for step, (call, result) in enumerate(zip(task.calls, task.results, strict=True)):
            messages.append(call_message(call, task.remark(step), f"call-{len(messages)}"))
            messages.append(result_message(result, f"call-{len(messages) - 1}"))
        messages.append({"role": "assistant", "content": task.answer})
    return messages


def call_message(call: Call, remark: str, identifier: str) -> Message:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    tool_call = {"id": identifier, "type": "function", "function": function}
    return {"role": "assistant", "content": remark, "tool_calls": [tool_call]}


def result_message(result: Value, identifier: str) -> Message:
    content = json.dumps({"result": result})
    return {"role": "tool", "tool_call_id": identifier, "content": content}


def plain_conversation(rng: random.Random) -> list[Message]:
    """A conversation without tools: the answers repeat parts of what the user said."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": " ".join(_plain_words(rng))})
    before: list[str] = []
    for _ in range(rng.randint(1, 4)):
        words = _plain_words(rng)
        messages.append({"role": "user", "content": " ".join(words)})
        ends = [words] if len(words) <= 6 else [words[:3], words[-3:]]
        said = f"You said {' and '.join(' '.join(end) for end in ends)}"
        after = f" after {' '.join(before[:4])}" if before else ""
        end = " and I have no tool for that, so please give me some steps to do."
        messages.append({"role": "assistant", "content": said + after + end})
        before = words
    return messages


def _plain_words(rng: random.Random) -> list[str]:
    if rng.random() < 0.2:
        return ["hello"]
    return rng.choices(PLAIN, k=int(2 ** rng.uniform(1, 7)))


def _shown(value: Value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


class _Maker:
    def __init__(self, rng: random.Random, split: Split, toolbox: Toolbox) -> None:
        self._rng = rng
        self._split: Split = split
        self._toolbox = toolbox
        self._calculates, self._goes_on = _FLAVOURS[rng.choice(list(_FLAVOURS))]
        self._clauses: list[str] = []
        self._calls: list[Call] = []
        self._results: list[Value] = []
        # What each result is: a number, or a name of this kind.
        self._kinds: list[str] = []
        self._names: list[str] = []

    def task(self, steps: int) -> Task:
        for _ in range(steps):
            if self._rng.random() >= self._calculates or not self._calculate():
                self._look_up()
        rng = self._rng
        report: Report = rng.choice(("last", "all"))
        numbered = (f"Step {n}, {clause}." for n, clause in enumerate(self._clauses, start=1))
        opening = rng.choice(_OPENINGS).format(steps)
        question = " ".join([opening, *numbered, rng.choice(_CLOSINGS[report])])
        return Task(
            question, tuple(self._clauses), tuple(self._calls), tuple(self._results), report
        )

    def _look_up(self) -> None:
        rng = self._rng
        style, tables = self._toolbox.style, self._toolbox.tables
        while True:
            earlier = [n for n, kind in enumerate(self._kinds) if kind != NUMBER]
            goes_on = rng.random() < self._goes_on and earlier
            source = self._favour_last(earlier) if goes_on else None
            if source is None:
                kind = rng.choice(list(FIELDS))
                subject = draw_name(rng, kind, self._split, self._names)
                mention = _shown(subject)
            else:
                kind, subject = self._kinds[source], str(self._results[source])
                mention = f"result {source + 1}"
            # Only a look-up that finds a name can be followed by a look-up of what it found.
            names = [field for field, result in FIELDS[kind].items() if result != NUMBER]
            field = rng.choice(names if rng.random() < self._goes_on else list(FIELDS[kind]))
            call = style.lookup(field, subject)
            if call not in self._calls:
                break
        self._names.append(subject)
        if subject not in tables.setdefault(field, {}):
            tables[field][subject] = self._fact(FIELDS[kind][field])
        wording = rng.choice(_LOOKUPS).format(field, mention)
        self._add(wording, call, FIELDS[kind][field])

    def _fact(self, kind: str) -> Value:
        if kind == NUMBER:
            return draw_number(self._rng, 10, self._rng.choice((99, 999, 9999)), self._split)
        return draw_name(self._rng, kind, self._split, self._names)

    def _calculate(self) -> bool:
        """Add a calculation; False if none was found that keeps results in range."""
        rng = self._rng
        earlier = [n for n, kind in enumerate(self._kinds) if kind == NUMBER]
        if not earlier and self._kinds and self._calculates < 1:
            return False
        for _ in range(20):
            operation = rng.choice(list(OPERATIONS))
            operands = [self._operand(earlier, first) for first in (True, False)]
            (left, left_text), (right, right_text) = operands
            if left_text == right_text or not 0 <= OPERATIONS[operation](left, right) <= _LARGEST:
                continue
            wording = rng.choice(_OPERATION_WORDINGS[operation]).format(left_text, right_text)
            self._add(wording, self._toolbox.style.operation(operation, left, right), NUMBER)
            return True
        return False

    def _operand(self, earlier: Sequence[int], first: bool) -> tuple[int, str]:
        if earlier and self._rng.random() < (0.9 if first else 0.4):
            source = self._favour_last(earlier)
            return int(self._results[source]), f"result {source + 1}"
        number = draw_number(self._rng, 2, self._rng.choice((40, 99, 999)), self._split)
        return number, str(number)

    def _favour_last(self, earlier: Sequence[int]) -> int:
        return earlier[-1] if self._rng.random() < 0.6 else self._rng.choice(earlier)

    def _add(self, clause: str, call: Call, kind: str) -> None:
        self._clauses.append(clause)
        self._calls.append(call)
        self._results.append(self._toolbox.run(call))
        self._kinds.append(kind)


def _schemas(
    rng: random.Random, toolbox: Toolbox, tasks: Sequence[Task], tokens: int
) -> tuple[Schema, ...]:
    """Return schemas of the needed tools, and of others up to this length, in random order."""
    needed = {call.name for task in tasks for call in task.calls}
    own = [toolbox.lookup_schema(rng, name) for name in KIND_OF_FIELD]
    own += [toolbox.operation_schema(rng, name) for name in OPERATIONS]
    rng.shuffle(own)
    chosen = {_name(schema): schema for schema in own if _name(schema) in needed}
    spare = [schema for schema in own if _name(schema) not in needed]
    length = sum(map(_length, chosen.values()))
    while True:
        more = spare.pop() if spare and rng.random() < 0.3 else distractor_schema(rng)
        length += _length(more)
        if length > tokens * _CHARS_PER_TOKEN:
            break
        chosen.setdefault(_name(more), more)
    schemas = list(chosen.values())
    rng.shuffle(schemas)
    return tuple(schemas)


def _name(schema: Schema) -> str:
    return str(schema["function"]["name"])


def _length(schema: Schema) -> int:
    return len(json.dumps(schema))
