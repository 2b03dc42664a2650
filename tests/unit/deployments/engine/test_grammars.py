"""What a request's grammar may cost, judged by the process that compiles it first."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from deployments.engine.grammars import Grammars
from deployments.upstream.unbounded_grammars import PATCH
from tests.unit.deployments.engine.vllm_server import renderer
from tests.unit.deployments.upstream.originals import unpatched

restored = unpatched(PATCH)

MODEL, RENDERER = renderer()
CONFIG = VllmConfig(model_config=MODEL)


def objects(**properties: Any) -> dict[str, Any]:
    return {"json": {"type": "object", "properties": properties, "required": [*properties]}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        inner = {"type": "object", "properties": {f"k{level}": schema}}
        schema = {"oneOf": [schema, inner]}
    return schema


class Client:
    """Stands in for vLLM's ``AsyncLLM``, which validates what it is asked for, as it does."""

    async def generate(self, prompt: Any, params: SamplingParams) -> AsyncIterator[str]:
        structured = CONFIG.structured_outputs_config
        params._validate_structured_outputs(MODEL, structured, RENDERER.tokenizer)
        yield params.structured_outputs._backend or ""


async def ended(grammars: Grammars) -> None:
    process = grammars._process
    grammars._end()
    if process is not None:
        await process.wait()


async def answers(*asked: dict[str, Any]) -> list[str]:
    """The backend that compiles each of these outputs, or what is wrong with it."""
    client, grammars = Client(), Grammars(CONFIG, RENDERER.tokenizer)
    grammars.bound(client)
    said = []
    for one in asked:
        outputs: Any = StructuredOutputsParams(**{k: one[k] for k in one if k != "calls"})
        outputs.calls = StructuredOutputsParams(**one["calls"]) if "calls" in one else None
        params = SamplingParams(structured_outputs=outputs)
        try:
            said += [output async for output in client.generate("", params)]
        except VLLMValidationError as error:
            said.append(str(error))
    await ended(grammars)
    return said


HOSTILE = {"structural_tag": json.dumps({"type": "structural_tag", "format": {
    "type": "json_schema",
    "json_schema": objects(b={"type": "string", "pattern": "^[a-z]{1,9999}$"})["json"]}})
}  # fmt: skip
COSTLY = "properties.b.pattern: it takes more than 2 s"
TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("an object", objects(a={"type": "string", "maxLength": 100_000}), "xgrammar"),
    ("a thousand values", objects(a={"enum": [f"value-{n}" for n in range(1000)]}), "xgrammar"),
    ("any object", {"json_object": True}, "xgrammar"),
    ("choices", {"choice": ["yes", "no"]}, "xgrammar"),
    ("a regex", {"regex": "((a|aa|aaa)+)+b"}, "xgrammar"),
    ("a grammar", {"grammar": 'root ::= "a" | "b"'}, "xgrammar"),
    ("what only guidance has", objects(a={"type": "integer", "multipleOf": 5}), "guidance"),
    ("a pattern with a count, in a tool that must be called", HOSTILE, COSTLY),
    ("the same, in a tool that may be called", {**objects(c={}), "calls": HOSTILE}, COSTLY),
    ("the same, beside any object", {"json_object": True, "calls": HOSTILE}, COSTLY),
    ("1,200 optional properties",
     {"json": {"type": "object",
               "properties": {f"p{n}": {"type": "integer"} for n in range(1200)}}},
     "properties: it takes more than 2 s"),
    ("alternatives within each other", {"json": nested(8)}, "xgrammar"),
    ("patterns of names beside names",
     {"json": {"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}}},
     "patternProperties: it is not served"),
    ("what never ends", {"json": {"$ref": "#"}}, "no text fits this"),
    ("a rule of itself", {"grammar": "root ::= root"}, "no text fits this"),
    ("no choice", {"choice": []}, "EBNF parser error"),
    ("half a schema", {"json": "{"}, "the schema is no JSON: Expecting property name"),
    ("an invalid regex", {"regex": "((("}, "egex"),
    ("a rule that is not there", {"grammar": 'root ::= "a" | no'}, "no"),
    ("an ordinary one after all of these", objects(z={"type": "integer"}), "xgrammar"),
]  # fmt: skip


async def test_a_grammar_is_served_or_refused_by_its_costliest_keyword() -> None:
    said = await answers(*(outputs for _, outputs, _ in TABLE))
    assert {name: (one, wanted) for (name, _, wanted), one in zip(TABLE, said, strict=True)
            if wanted not in one} == {}  # fmt: skip


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(CONFIG, RENDERER.tokenizer)
    yield made
    await ended(made)


async def test_a_client_that_leaves_does_not_shift_answers(grammars: Grammars) -> None:
    left = asyncio.create_task(grammars.judge(StructuredOutputsParams(regex="((")))
    await asyncio.wait([left], timeout=0.1)
    left.cancel()
    await grammars.judge(StructuredOutputsParams(regex="[a-c]"))


async def test_a_process_that_hangs_is_replaced(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grammars.judge(StructuredOutputsParams(regex="a"))
    stopped = grammars._process
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    with monkeypatch.context() as soon:
        soon.setattr("deployments.engine.grammars._WAIT_S", 0.5)
        with pytest.raises(VLLMValidationError, match="not compiled in time"):
            await grammars.judge(StructuredOutputsParams(regex="b"))
    assert await stopped.wait() == -signal.SIGKILL
    await grammars.judge(StructuredOutputsParams(regex="b"))


async def test_a_grammar_is_compiled_once_and_outlives_its_process(grammars: Grammars) -> None:
    outputs = StructuredOutputsParams(**objects(a={"type": "integer"}))
    await grammars.judge(outputs)
    process = grammars._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await grammars.judge(outputs)
    assert grammars._process is process
    with pytest.raises(VLLMValidationError, match="too much memory"):
        await grammars.judge(StructuredOutputsParams(regex="[a-z]+"))
    await grammars.judge(StructuredOutputsParams(regex="[a-z]*"))
