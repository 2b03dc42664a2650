"""What ConServe costs: warm turns through it, against the bare engine's own server.

    python -m benchmarks.experiments.overhead [--rounds 40] [--json PATH]

The same engine settings behind vLLM's OpenAI server, behind ConServe (one prefiller, one decoder)
and behind Ray Serve LLM's usual ingress, all up at the same time and measured in turn, in random
order, round after round. Only later turns count (64 output tokens each), the first turn of a
conversation is run and not measured. TBT is the time between a stream's parts, so a server that
sends several tokens at a time (Ray Serve LLM does) shows fewer and longer ones. Ratios are medians
over rounds, each round's median latency against the bare engine's in the same round (the machine's
noise is larger than the difference), with a bootstrap interval of 95 %.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.peers.ray_llm import serving_command
from conserve.console import new_console
from conserve.engines import engine_environment, model_source, server_command
from conserve.launch import Launch, LaunchError
from conserve.settings import EMBEDDED_MODEL

MODEL = "conserve-embedded"
OUTPUT_TOKENS = 64
TURNS = 8
# Turns of one system in one round, over all its clients.
ROUND_TURNS = 4
BOOTSTRAP_DRAWS = 2000
BARE = "vLLM's own server"
CONSERVE = "ConServe"
RAY = "Ray Serve LLM"
SYSTEMS = {
    BARE: "http://127.0.0.1:8191",
    CONSERVE: "http://127.0.0.1:8000",
    RAY: "http://127.0.0.1:8192",
}
_WORDS = [
    "open",
    "close",
    "read",
    "write",
    "file",
    "class",
    "return",
    "import",
    "value",
    "index",
    "print",
    "while",
    "yield",
]
# All systems' engines are started with these, ConServe's by its own defaults.
_ENGINE_ARGUMENTS = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 16384}


@dataclass
class WarmTurns:
    """Warm turns of one system with one number of clients; times in seconds."""

    latency_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    round_median_s: list[float] = field(default_factory=list)


class ChatAgent:
    """One agent: a conversation of `TURNS` turns after another, with every system the same."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        seed: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = headers or {}
        self._session = session
        self._url = url
        self._seed = seed
        self._rng = random.Random(seed)
        self._number = 0
        self._messages: list[dict[str, str]] = []
        self._left = 0

    async def warm_turn(self, samples: WarmTurns | None) -> None:
        """Run one later turn; a new conversation's first turn goes before it, unmeasured."""
        if self._left == 0:
            self._left = TURNS
            self._number += 1
            self._messages = []
            await self._turn(400, None)
        self._left -= 1
        await self._turn(30, samples)

    async def prepare(self) -> None:
        """Have the next turn be a warm one."""
        if self._left == 0:
            await self.warm_turn(None)

    async def _turn(self, words: int, samples: WarmTurns | None) -> None:
        prompt = " ".join(self._rng.choice(_WORDS) for _ in range(words))
        self._messages.append({"role": "user", "content": prompt})
        body = {
            "model": MODEL,
            "messages": self._messages,
            "max_tokens": OUTPUT_TOKENS,
            "min_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {**self._headers, "X-Conversation-Id": f"{self._seed}-{self._number}"}
        raw = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
        parts: list[bytes] = []
        arrivals: list[float] = []
        started_s = time.perf_counter()
        async with self._session.post(
            self._url + "/v1/chat/completions", data=raw, headers=headers
        ) as response:
            async for part in response.content.iter_any():
                arrivals.append(time.perf_counter())
                parts.append(part)
        ended_s = time.perf_counter()
        if response.status != 200:
            raise RuntimeError(f"{self._url}: {response.status} {b''.join(parts)[:300]!r}")
        # The answer is parsed after the clock has stopped.
        content, tokens = _content(b"".join(parts))
        if tokens != OUTPUT_TOKENS:
            raise RuntimeError(f"{self._url}: {tokens} tokens, not {OUTPUT_TOKENS}")
        self._messages.append({"role": "assistant", "content": content})
        if samples is not None:
            samples.latency_s.append(ended_s - started_s)
            samples.ttft_s.append(arrivals[0] - started_s)
            samples.tbt_s += [later - earlier for earlier, later in pairwise(arrivals)]


def _content(stream: bytes) -> tuple[str, int]:
    """A streamed answer's text and number of tokens."""
    text: list[str] = []
    tokens = 0
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            text += [choice["delta"].get("content") or "" for choice in event["choices"]]
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return "".join(text), tokens


async def measure(
    systems: dict[str, str],
    clients: int,
    rounds: int,
    progress: Progress,
    seed: int,
    headers: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, WarmTurns]:
    """Alternate the systems, `rounds` times, with so many clients at the same time.

    Args:
        headers: what a system's requests carry, by its name.
    """
    own = headers or {}
    order = random.Random(seed)
    results = {name: WarmTurns() for name in systems}
    task = progress.add_task(f"{clients} client{'s' * (clients > 1)}", total=rounds)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        agents = {
            name: [
                ChatAgent(session, url, f"{seed}-{clients}-{n}", own.get(name))
                for n in range(clients)
            ]
            for name, url in systems.items()
        }
        for number in range(rounds + 2):
            names = list(systems)
            order.shuffle(names)
            for name in names:
                here = WarmTurns()
                while len(here.latency_s) < ROUND_TURNS:
                    await asyncio.gather(*(agent.prepare() for agent in agents[name]))
                    await asyncio.gather(*(agent.warm_turn(here) for agent in agents[name]))
                if number < 2:
                    continue  # Warm-up rounds.
                results[name].latency_s += here.latency_s
                results[name].ttft_s += here.ttft_s
                results[name].tbt_s += here.tbt_s
                results[name].round_median_s.append(statistics.median(here.latency_s))
            if number >= 2:
                progress.advance(task)
    return results


def paired_ratio(system: WarmTurns, bare: WarmTurns) -> tuple[float, float, float]:
    """Median over rounds of this system's latency against the bare engine's.

    Returns:
        The ratio, and the ends of its 95 % interval (bootstrap over rounds).
    """
    rounds = zip(system.round_median_s, bare.round_median_s, strict=True)
    return median_interval([mine / theirs for mine, theirs in rounds])


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % interval (bootstrap over the values)."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(BOOTSTRAP_DRAWS)
    )
    return statistics.median(values), percentile(medians, 0.025), percentile(medians, 0.975)


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th quantile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def report(results: dict[int, dict[str, WarmTurns]], console: Console, base: str = BARE) -> None:
    """Print a table for each number of clients, with ratios to the system ``base``."""
    for clients, systems in results.items():
        table = Table(title=f"{clients} client{'s' * (clients > 1)}, warm turns, milliseconds")
        table.add_column("system", no_wrap=True)
        for column in ("ratio", "95 %", "latency p50", "p95", "TTFT p50", "p95", "TBT p50", "p95"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, samples in systems.items():
            cells = []
            for values in (samples.latency_s, samples.ttft_s, samples.tbt_s):
                cells += [f"{percentile(values, q) * 1000:.1f}" for q in (0.5, 0.95)]
            ratio, low, high = paired_ratio(samples, systems[base])
            interval = "" if name == base else f"{low:.3f}-{high:.3f}"
            table.add_row(name, f"{ratio:.3f}", interval, *cells)
        console.print(table)


def _bare_engine(log: Path) -> Launch:
    source = model_source(EMBEDDED_MODEL)
    command = server_command(source, MODEL, _port(BARE), _ENGINE_ARGUMENTS)
    return Launch([], log, engine_environment(EMBEDDED_MODEL, gpu=False), command)


def _ray_serve_llm(log: Path) -> Launch:
    # This is its usual ingress, Ray's own proxy, without the settings for high throughput that the
    # peer `ray_serve_llm` has.
    command = serving_command("build_openai_app", _port(RAY), 8, {"llm_configs": [_ray_config()]})
    # ConServe starts Ray with this niceness; by Ray's default the engine would yield to the other
    # systems.
    return Launch([], log, {"HF_HUB_OFFLINE": "1", "RAY_worker_niceness": "0"}, command)


def _ray_config() -> dict[str, Any]:
    """Ray Serve LLM's `LLMConfig` with the embedded model on one engine."""
    return {
        "model_loading_config": {
            "model_id": MODEL,
            "model_source": model_source(EMBEDDED_MODEL),
        },
        "engine_kwargs": {**_ENGINE_ARGUMENTS, "distributed_executor_backend": "mp"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
        "runtime_env": {"env_vars": engine_environment(EMBEDDED_MODEL, gpu=False)},
        "log_engine_metrics": False,
    }


def _port(system: str) -> int:
    return int(SYSTEMS[system].rsplit(":", 1)[1])


async def _until_answering(launch: Launch, url: str, name: str) -> None:
    deadline_s = time.monotonic() + 400
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            if not launch.running:
                raise LaunchError(f"{name} ended while it started; see its log")
            try:
                async with session.get(url + "/v1/models") as response:
                    if response.status == 200 and (await response.json())["data"]:
                        return
            except (aiohttp.ClientError, ValueError):
                pass
            await asyncio.sleep(0.5)
    raise LaunchError(f"{name} was not ready after 400 s; see its log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--without-ray-serve-llm", action="store_true")
    parser.add_argument("--client-core", type=int, help="pin this process to a core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = new_console(least_width=110)
    if options.client_core is not None:
        os.sched_setaffinity(0, {options.client_core})
    logs = Path(tempfile.mkdtemp(prefix="conserve-overhead-"))
    systems = dict(SYSTEMS)
    if options.without_ray_serve_llm:
        del systems[RAY]
    results: dict[int, dict[str, WarmTurns]] = {}
    bare = _bare_engine(logs / "bare.log")
    conserve = Launch(["decoders=1"], logs / "conserve.log")
    peer = _ray_serve_llm(logs / "ray-serve-llm.log")
    try:
        with console.status(f"starting the systems (logs: {logs})") as status:
            bare.__enter__()
            asyncio.run(_until_answering(bare, SYSTEMS[BARE], BARE))
            status.update("starting ConServe")
            conserve.__enter__()
            conserve.wait_until_serving(SYSTEMS[CONSERVE], 1, 1)
            if RAY in systems:
                status.update("starting Ray Serve LLM")
                peer.__enter__()
                asyncio.run(_until_answering(peer, SYSTEMS[RAY], RAY))
        with Progress(console=console) as progress:
            for clients in options.clients:
                results[clients] = asyncio.run(
                    measure(systems, clients, options.rounds, progress, options.seed)
                )
        report(results, console)
    finally:
        for launch in (peer, conserve, bare):
            launch.stop()
    if options.json:
        body: dict[str, Any] = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "ratios": {
                clients: {name: paired_ratio(s, found[BARE]) for name, s in found.items()}
                for clients, found in results.items()
            },
            "samples": {
                clients: {name: asdict(samples) for name, samples in found.items()}
                for clients, found in results.items()
            },
        }
        options.json.write_text(json.dumps(body) + "\n")


if __name__ == "__main__":
    main()
