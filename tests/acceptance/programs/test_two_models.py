"""Coding agents that use a small model beside their main one, by the names that they have for both.

`make test-clients` runs this, not `make test`: the programs bring gigabytes.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.launch import Launch
from tests.acceptance.clients.clients import PROGRAMS, Client, Place
from tests.acceptance.clients.driving import work
from tests.acceptance.clients.recorder import Recorder
from tests.engines.applications import START_S, URL

# As an operator would name them: what clients ask for is an alias.
SETTINGS: dict[str, Any] = {
    "engine": {
        "dtype": "float32",
        "max_model_len": 32768,
        "logits_processors": ["tests.acceptance.clients.forced:ForcedAnswers"],
    },
    "prefillers": 0,
    "decoders": 1,
    "lmcache.size_gb": 0.5,
    "models": {
        "main": {"model": "embedded", "aliases": ["claude-*"]},
        "quick": {"model": "embedded", "aliases": ["claude-haiku-*"]},
    },
}
_HELPER = {"looker": {"description": "Looks.", "prompt": "You look.", "model": "haiku"}}


def both(name: str, edits: dict[str, str], script: str | None = None) -> Client:
    """Return a program that is told of no model by a name of ours, or of both."""
    client = next(one for one in PROGRAMS if one.name == name)
    return dataclasses.replace(
        client, edits={**client.edits, **edits}, script=script or client.script
    )


CLIENTS = (
    # It knows no other model than its maker's.
    both(
        "Claude Code",
        {
            "export ANTHROPIC_MODEL=conserve-embedded\n": "",
            "export ANTHROPIC_SMALL_FAST_MODEL=$ANTHROPIC_MODEL\n": "",
            "--allowedTools Bash": f"--allowedTools Bash,Agent --agents '{json.dumps(_HELPER)}'",
        },
        "claude-code-helper",
    ),
    both(
        "opencode",
        {
            '"model": "conserve/conserve-embedded"': '"model": "conserve/main"',
            '"small_model": "conserve/conserve-embedded"': '"small_model": "conserve/quick"',
            '"models": {"conserve-embedded": {"limit"': '"models": {"quick": {"limit":'
            ' {"context": 32768, "output": 8192}}, "main": {"limit"',
        },
    ),
)


@pytest.mark.parametrize("program", CLIENTS, ids=lambda program: program.name)
async def test_a_task_is_done_with_two_models(
    machine_alone: None, program: Client, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(SETTINGS))
    with Launch([f"config={file}"], tmp_path / "serve.log") as application:
        application.wait_until_serving(URL, 0, 2, timeout_s=START_S)
        async with Recorder(URL) as recorder:
            place = Place(recorder.url, tmp_path / "home", tmp_path / "work", program.name)
            await work(program, place)
        async with httpx.AsyncClient() as client:
            listed = (await client.get(f"{URL}/v1/conversations")).json()["data"]
    assert not recorder.outside
    asked = [one for one in recorder.exchanges if one.path == program.api]
    assert {one.status for one in asked} == {200}
    turns = Counter[str]()
    for history in (one for conversation in listed for one in conversation["histories"]):
        turns[history["model"]] += history["turns"]
    # The task is the main one's, and titles or helpers are the other's.
    assert turns["main"] >= 3
    assert turns["quick"] >= 1
    assert sum(turns.values()) == len(asked), [one.body["model"] for one in asked]
