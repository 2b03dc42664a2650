"""Coding agents do a task, as they are: one prefill and one handoff a history.

`make test-clients` runs this, not `make test`: the programs bring gigabytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from conserve.embedded import model_path
from tests.acceptance.clients.clients import PROGRAMS, Client
from tests.acceptance.clients.driving import TWO_BLOCKS, drive, require_served
from tests.engines.applications import CLIENTS

pytestmark = [pytest.mark.anyio, pytest.mark.application(CLIENTS)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_task_is_done(application: str, program: Client, tmp_path: Path) -> None:
    done = await drive(program, application, tmp_path, run=program.name)
    require_served(done)
    if not program.appends:
        # What is left of an earlier prompt is not computed again, nor is a prompt that is new.
        assert 1 <= done.counts.handoffs <= len(done.turns)
        prompts: list[list[int]] = []
        for turn in done.turns:
            prompt = prompt_ids(turn.body)
            assert len(prompt) == turn.usage.prompt_tokens
            warm = max((shared(prompt, earlier) for earlier in prompts), default=len(prompt))
            assert turn.usage.cached_tokens >= warm - TWO_BLOCKS
            prompts.append(prompt)


def prompt_ids(body: Mapping[str, Any]) -> list[int]:
    """A chat's prompt, of text alone, as the embedded model's template has it."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    said = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        for message in body["messages"]
    )
    ids: list[int] = tokenizer.encode(said + "<|im_start|>assistant\n").ids
    return ids


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two prompts begin with alike."""
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    return alike
