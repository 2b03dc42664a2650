"""The AgentX scenario of NVIDIA's AIPerf, on recorded sessions that are scaled to small engines.

AIPerf writes prompts itself, of as many tokens as a recording says, and takes part of a history for
the same text where its blocks are the same. A block of 64 tokens becomes one token here, and a
recording's times are divided by 64 too. A run is no valid submission, and says so: it is shorter
than a quarter of an hour, and of scaled sessions.
"""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

from conserve_lab.client import Endpoint
from conserve_lab.workloads.files import recordings

COLUMNS = ["requests (failed)", "TTFT, s: p50 / p95", "ms a token, p50 / p95", "tokens/s"]
COLUMNS += ["prompt tokens", "found"]
_BLOCK_TOKENS = 64
_TIMES = {"t", "api_time", "think_time", "ttft"}
_TOKENS = {"tool_tokens", "system_tokens", "duration_ms", "in", "out"}


def scale(data: Path, folder: Path) -> None:
    """Write every recording as AIPerf's ``weka_trace``, a block of tokens as one token."""
    folder.mkdir()
    for number, one in enumerate(recordings(data)):
        session = json.loads(one.read())
        (folder / f"{number:04}.json").write_text(json.dumps(_scaled(session)))


def _scaled(part: dict[str, Any]) -> dict[str, Any]:
    """Scale a session, a sub-agent, or a call."""
    found = dict(part)
    for name in _TIMES & found.keys():
        found[name] = found[name] and found[name] / _BLOCK_TOKENS
    for name in _TOKENS & found.keys():
        found[name] = -(-(found[name] or 0) // _BLOCK_TOKENS)
    if "block_size" in found:
        found["block_size"] = 1
    if "requests" in found:
        found["requests"] = [_scaled(call) for call in found["requests"]]
    return found


def run(program: Path, endpoint: Endpoint, model: Path, logs: Path, **given: object) -> list[str]:
    """Measure a system with AIPerf; returns a table's cells for `COLUMNS`.

    Args:
        program: AIPerf's, in an environment of its own.
        model: whose tokenizer counts.
        logs: a folder with ``traces``, which `scale` wrote; AIPerf's results go into another there.
        given: more of its options.

    Raises:
        subprocess.CalledProcessError: it failed; what it said is in ``folder / "said"``.
    """
    folder = logs / f"aiperf-{endpoint.system}-{given['random-seed']}"
    options = {
        "model": endpoint.model, "url": endpoint.url, "tokenizer": model,
        "endpoint-type": "chat", "input-file": logs / "traces", "custom-dataset-type": "weka_trace",
        "scenario": "inferencex-agentx-mvp", "session-header": "x-session-id",
        "extra-inputs": "ignore_eos:true", "ui-type": "none", "artifact-dir": folder, **given,
    }  # fmt: skip
    flags = ("--streaming", "--unsafe-override", "--use-server-token-count", "--no-gpu-telemetry",
             "--no-server-metrics")  # fmt: skip
    folder.mkdir()
    with (folder / "said").open("wb") as said:
        command = [program, "profile", *flags, *(f"--{k}={v}" for k, v in options.items())]
        subprocess.run([*map(str, command)], check=True, stdout=said, stderr=subprocess.STDOUT)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())

    def of(name: str, what: str = "avg") -> float:
        return float((found.get(name) or {}).get(what) or 0.0)

    ttft, token = "time_to_first_token", "inter_token_latency"
    prompts = of("usage_prompt_tokens") or math.nan
    return [
        f"{of('request_count'):,.0f} ({of('error_request_count'):,.0f})",
        f"{of(ttft, 'p50') / 1000:.2f} / {of(ttft, 'p95') / 1000:.2f}",
        f"{of(token, 'p50'):.0f} / {of(token, 'p95'):.0f}",
        f"{of('output_token_throughput'):.1f}",
        f"{prompts:,.0f}",
        f"{of('usage_prompt_cache_read_tokens') / prompts:.1%}",
    ]
