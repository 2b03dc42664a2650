"""What AIPerf is given, and what is read from its results."""

import json
from pathlib import Path
from typing import Any

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


def test_a_row_has_what_was_measured() -> None:
    found: dict[str, Any] = {
        "request_count": {"avg": 1200.0},
        "time_to_first_token": {"p50": 120.0, "p95": 2500.0},
        "inter_token_latency": {"p50": 10.0, "p95": 99.6},
        "output_token_throughput": {"avg": 33.33},
        "usage_prompt_tokens": {"avg": 1000.0},
        "usage_prompt_cache_read_tokens": {"avg": 600.0},
    }
    row = ["1,200 (0)", "0.12 / 2.50", "10 / 100", "33.3", "1,000", "60.0%"]
    assert aiperf.cells(found) == row
    assert len(row) == len(aiperf.COLUMNS)
