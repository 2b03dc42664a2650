"""Scripted answers: which one a prompt gets, and that its tokens are those of the next prompt."""

import json
from typing import Any

import pytest

from scripts.embedded.data import Renderer
from tests.engines.clients.scripts import ASIDE, SCRIPTS, answer_to, task
from tests.engines.clients.tokens import ForcedTokens

RENDERER = Renderer()
Message = dict[str, Any]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "a shell"}}


def tools_of(script: str) -> list[dict[str, Any]]:
    names = {step.tool for step in SCRIPTS[script].steps if step.tool}
    return [tool(name) for name in sorted(names)]


def asked(messages: list[Message], script: str) -> str:
    return RENDERER.text(messages, tools_of(script), answering=True)


def said(prompt: str, begun: str = "") -> str:
    """What is forced behind a prompt, of which a part may have been said."""
    forced = ForcedTokens(RENDERER.tokenizer, RENDERER.ids(prompt + begun))
    ids: list[int] = []
    while not ids or ids[-1] != RENDERER.tokenizer.token_to_id("<|im_end|>"):
        token = forced.at(len(ids))
        assert token is not None
        ids.append(token)
    return str(RENDERER.tokenizer.decode(ids, skip_special_tokens=False))


def message_of(answer: str) -> Message:
    """An answer as a client gets it, and sends it again."""
    text, mark, call = answer.removesuffix("<|im_end|>").partition("\n<tool_call>\n")
    if not mark:
        return {"role": "assistant", "content": text}
    function = json.loads(call.removesuffix("\n</tool_call>"))
    return {"role": "assistant", "content": text, "tool_calls": [{"function": function}]}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_played_step_by_step_in_the_tokens_of_the_next_prompt(script: str) -> None:
    system = f"You work here. {SCRIPTS[script].belongs}"
    messages: list[Message] = [
        {"role": "system", "content": system},
        {"role": "user", "content": task(script, "a")},
    ]
    for step in SCRIPTS[script].steps:
        prompt = asked(messages, script)
        answer = said(prompt)
        assert answer == step.rendered() + "<|im_end|>"
        messages.append(message_of(answer))
        following = RENDERER.ids(RENDERER.text(messages, tools_of(script)))
        whole = RENDERER.ids(prompt) + RENDERER.ids(answer)
        assert following[: len(whole)] == whole
        messages.append({"role": "tool", "content": "exit status 0"})
    assert said(asked(messages, script)) == ASIDE + "<|im_end|>"


def test_what_belongs_to_no_script_gets_a_short_answer() -> None:
    user = {"role": "user", "content": task("bash", "a")}
    # A title is asked for in the task's own words, without its tools.
    assert answer_to(asked([user], "aider")) == ASIDE
    assert answer_to(asked([{"role": "user", "content": "quota"}], "bash")) == ASIDE
    user = {"role": "user", "content": "SCRIPT:unheard-of"}
    assert answer_to(asked([user], "bash")) == ASIDE


def test_an_answer_goes_on_where_it_was_cut() -> None:
    prompt = asked([{"role": "user", "content": task("bash", "a")}], "bash")
    answer = said(prompt)
    ids = RENDERER.ids(prompt + answer)
    for cut in range(len(RENDERER.ids(prompt)), len(ids)):
        forced = ForcedTokens(RENDERER.tokenizer, ids[:cut])
        assert forced.at(0) == ids[cut]


def test_what_is_no_chat_is_left_to_the_model() -> None:
    assert ForcedTokens(RENDERER.tokenizer, RENDERER.ids("SCRIPT:bash Run a.")).at(0) is None
