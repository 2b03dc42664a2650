"""Recorded sessions, scaled for AIPerf."""

import json
from pathlib import Path

from experiments import aiperf


def test_a_block_becomes_a_token_and_times_go_by_the_same_factor(tmp_path: Path) -> None:
    call = {"t": 64.0, "type": "n", "model": "m", "in": 129, "out": 1, "hash_ids": [1, 2]}
    inside = call | {"api_time": 32.0, "think_time": None}
    agent = {"t": 128.0, "type": "subagent", "duration_ms": None, "requests": [inside]}
    session = {"id": "s", "block_size": 64, "tool_tokens": 640, "requests": [call, agent]}
    (tmp_path / "one.json").write_text(json.dumps(session))
    aiperf.scale(tmp_path, tmp_path / "scaled")
    (written,) = (tmp_path / "scaled").iterdir()
    scaled = json.loads(written.read_text())
    first, second = scaled.pop("requests")
    assert scaled == {"id": "s", "block_size": 1, "tool_tokens": 10}
    assert first == call | {"t": 1.0, "in": 3}
    assert second == agent | {
        "t": 2.0,
        "duration_ms": 0,
        "requests": [call | {"t": 1.0, "in": 3, "api_time": 0.5, "think_time": None}],
    }
