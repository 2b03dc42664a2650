"""Compares systems on families of agents: a parent, and children that begin together.

A parent has one turn. Then N children begin within 50 ms, each a conversation of its own that names
its parent. All have one system text and tool list of some 1,500 tokens (new for each fan-out, so
that no cache has it), a task of their own, and 2 or 3 more turns after tools. When all have ended
the next fan-out begins, on another system: rounds alternate, in a random order. All systems are up
all the time, each with as many engines, and do the same work: prompts, lengths and tools' times are
drawn from the seed, the round and N; answers are greedy and of a fixed length.

Run it from a worktree: ``PYTHONPATH=$PWD python -P -m experiments.families --system
before=/path/of/a/worktree --peers vllm_router_hash,ray_prefix``. ``NAME=WORKTREE,SETTING=VALUE``
gives that ConServe settings; of these, ``prefillers`` is 1 and the other engines are decoders.

*shared x* is how many times over the shared beginning was computed: of the children's first
prompts, the tokens that ``usage.prompt_tokens_details.cached_tokens`` does not count as found, less
what each child's own part needs (all behind the shared whole blocks), over the tokens of these
whole blocks. 1 is the least, N is each for itself. The JSON has the same sum over all turns beside
what engines counted (``vllm:prompt_tokens_by_source{source="local_compute"}``), where they say it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import psutil

BLOCK_TOKENS = 128
_PARENT_HEADER = "x-parent-session-id"
_FIRST_WORDS, _TOOLS = 1_120, 4
_TASK_WORDS, _APPEND_WORDS = 60, 80
_OUTPUT_TOKENS = (50, 500)
_PARENT_WORDS, _PARENT_TOKENS = 200, 64
_TOOL_S = (0.2, 2.0)
_TOGETHER_S, _APART_S = 0.05, 3.0
_TURN_S = 300.0
_LOOK_S = 0.01
# A system of two engines takes 2.5 GiB (vLLM's servers) to 5.5 (ConServe, Ray Serve LLM).
_LEAST_FREE_BYTES = 6 * 2**30


# --- The work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One turn; ``tool_s`` is how long the tool before it takes."""

    text: str
    output_tokens: int
    tool_s: float = 0.0


@dataclass(frozen=True)
class Child:
    name: str
    delay_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class FanOut:
    """A family: its parent's turn, what all children share, and the children."""

    parent: str
    parent_text: str
    system: str
    tools: list[dict[str, Any]]
    children: tuple[Child, ...]


def fan_out(seed: str, count: int, one_by_one: bool) -> FanOut:
    from experiments.agents import words

    rng = random.Random(seed)

    def tool(number: int) -> dict[str, Any]:
        string = {"type": "string", "description": words(rng, 12)}
        return {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": words(rng, 40),
                "parameters": {
                    "type": "object",
                    "properties": {"path": string, "text": string},
                    "required": ["path"],
                },
            },
        }

    def turns() -> tuple[Turn, ...]:
        first = Turn(words(rng, _TASK_WORDS), rng.randint(*_OUTPUT_TOKENS))
        later = (
            Turn(words(rng, _APPEND_WORDS), rng.randint(*_OUTPUT_TOKENS), rng.uniform(*_TOOL_S))
            for _ in range(rng.choice((2, 3)))
        )
        return (first, *later)

    system, tools = words(rng, _FIRST_WORDS), [tool(number) for number in range(_TOOLS)]
    delays = [_APART_S * one if one_by_one else rng.uniform(0, _TOGETHER_S) for one in range(count)]
    children = [Child(f"{seed}-child{one}", delay, turns()) for one, delay in enumerate(delays)]
    system += "\n" + json.dumps(tools)
    return FanOut(f"{seed}-parent", words(rng, _PARENT_WORDS), system, tools, tuple(children))


class Shared:
    """Counts the tokens that all children's prompts begin with, by the model's template."""

    def __init__(self, model_source: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_source)

    def tokens(self, fan: FanOut) -> int:
        one, other = (self._prompt(fan, text) for text in ("open", "while"))
        same = zip(one, other, strict=False)
        return next(number for number, (mine, theirs) in enumerate(same) if mine != theirs)

    def _prompt(self, fan: FanOut, text: str) -> list[int]:
        messages = [{"role": "system", "content": fan.system}, {"role": "user", "content": text}]
        shown = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        found: list[int] = self._tokenizer(shown, add_special_tokens=False).input_ids
        return found


# --- The systems ----------------------------------------------------------------------------------


@dataclass
class System:
    """A system that is up.

    Attributes:
        conserve: whether it is told that conversations have ended, and names engines in answers.
        metrics: URLs of its engines' metrics, by name; empty where they have none.
        haproxy: URL of the metrics of Ray Serve's HAProxy, if it has one.
    """

    name: str
    url: str
    model: str
    model_source: str
    header: str
    conserve: bool
    metrics: dict[str, str] = field(default_factory=dict)
    haproxy: str | None = None


def extra_peers() -> dict[str, Callable[[Any], Any]]:
    """Return peers that `conserve_lab.peers` lacks."""
    from conserve_lab.peers import systems
    from conserve_lab.peers.plan import engine_arguments

    def routed(options: Any, *replaced: str) -> Any:
        """vLLM's router by requests, with another policy or options after it."""
        plan = systems._routed(options, engine_arguments(options), programs=False)
        *engines, router = plan.parts
        at = router.command.index("--policy")
        command = (*router.command[:at], "--policy", *replaced, *router.command[at + 2 :])
        return replace(plan, parts=(*engines, replace(router, command=command)))

    def ray(options: Any, *, prefix: bool) -> Any:
        """Ray Serve LLM's peer, with HAProxy's files and replicas' ports apart from another one's.

        With ``prefix`` its router is PrefixCacheAffinityRouter, with the thresholds of Ray's user
        guide, and HAProxy hands it the request's body, as it has to.
        """
        plan = systems.ray_serve_llm(options)
        (part,) = plan.parts
        # HAProxy's names of sockets are short.
        folder = f"/tmp/hap-{options.port}"
        own = {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(8501 + prefix),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(9501 + prefix),
        }
        # Else replicas of two applications are given the same ports.
        for kind, lowest in (("HTTP", 17_000), ("GRPC", 19_000)):
            own[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"] = str(lowest + 500 * prefix)
            own[f"RAY_SERVE_DIRECT_INGRESS_MAX_{kind}_PORT"] = str(lowest + 500 * prefix + 400)
        command = part.command
        if prefix:
            own["RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"] = "1"
            arguments = json.loads(command[-1])
            for one in arguments["llm_configs"]:
                one["deployment_config"]["request_router_config"] = {
                    "request_router_class": (
                        "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
                    ),
                    "request_router_kwargs": {
                        "imbalanced_threshold": 10,
                        "match_rate_threshold": 0.1,
                    },
                }
            command = (*command[:-1], json.dumps(arguments))
        part = replace(part, command=command, environment={**part.environment, **own})
        return replace(plan, parts=(part,))

    return {
        "vllm_router_hash": lambda options: routed(options, "consistent_hash"),
        "vllm_router_cache": lambda options: routed(options, "cache_aware"),
        "ray_serve_llm": lambda options: ray(options, prefix=False),
        "ray_prefix": lambda options: ray(options, prefix=True),
    }


def conserve_peer(settings: Sequence[str]) -> Callable[[Any], Any]:
    """Return ConServe as a peer, with what `conserve serve` starts with and these settings."""
    from conserve_lab.peers import systems

    own = [one for one in settings if not one.startswith("prefillers=")]
    prefillers = next((int(one[11:]) for one in settings if one.startswith("prefillers=")), 1)

    def plan(options: Any) -> Any:
        decoders = options.engines - prefillers
        return systems._application(
            "conserve", options, *own, prefillers=prefillers, decoders=decoders
        )

    return plan


def apart(name: str, settings: Sequence[str]) -> None:
    """Run one peer with the code of this process's own tree, as `conserve_lab.peers.apart` does."""
    import conserve
    from conserve_lab.peers import PEERS, apart

    tree = Path.cwd()
    if not Path(str(conserve.__file__)).is_relative_to(tree):
        raise SystemExit(f"{conserve.__file__} is not in {tree}")
    PEERS.update(extra_peers())
    if name == "conserve":
        PEERS[name] = conserve_peer(settings)
    sys.argv = [sys.argv[0], name]
    apart.main()


@contextlib.contextmanager
def started(
    label: str,
    peer: str,
    tree: Path,
    settings: Sequence[str],
    options: Any,
    say: Callable[..., Any],
) -> Iterator[System]:
    """Have a system up, with the code of a tree; ends with the block, or with this process."""
    from conserve_lab.peers.apart import _ready, _stop

    command = [sys.executable, "-P", __file__, "--apart", peer, *settings]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        sent = asdict(options) | {"logs": str(options.logs)}
        child.stdin.write(json.dumps(sent) + "\n")
        child.stdin.flush()
        up = _ready(label, child.stdout, lambda text: say(f"  {label}: {text}"))
        metrics, haproxy = {}, None
        for process in up.described["processes"]:
            own = process["command"]
            if process["name"].startswith("vllm-"):
                metrics[process["name"]] = _metrics_url(own[own.index("--port") + 1])
            if port := process["environment"].get("RAY_SERVE_HAPROXY_METRICS_PORT"):
                haproxy = _metrics_url(port)
        yield System(
            label, up.url, up.model, up.described["model"], up.session_header or "x-session-id",
            peer == "conserve", metrics, haproxy,
        )  # fmt: skip
    finally:
        _stop(child)


def _metrics_url(port: str | int) -> str:
    return f"http://127.0.0.1:{port}/metrics"


# --- Counters of engines --------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? ([0-9.e+-]+)$", re.M)


@dataclass
class Counted:
    """Requests that ended, by engine, and prompt tokens that engines computed; None: not told."""

    requests: Counter[str]
    computed: float | None


async def counted(session: aiohttp.ClientSession, system: System) -> Counted:
    requests: Counter[str] = Counter()
    if system.haproxy is not None:
        for name, labels, value in await _samples(session, system.haproxy):
            if name == "haproxy_server_http_responses_total" and labels.get("code") == "2xx":
                requests[labels["server"]] += int(float(value))
        return Counted(requests, None)
    metrics = system.metrics
    if system.conserve:
        async with session.get(f"{system.url}/metrics/targets") as response:
            targets = await response.json()
        metrics = {
            one["labels"]["replica"]: f"http://{one['targets'][0]}/metrics"
            for one in targets if one["labels"]["part"] == "engine"
        }  # fmt: skip
    computed = 0.0
    for engine, url in metrics.items():
        for name, labels, value in await _samples(session, url):
            if name == "vllm:request_success_total":
                requests[engine] += int(float(value))
            elif name == "vllm:prompt_tokens_by_source_total":
                computed += float(value) * (labels["source"] == "local_compute")
    return Counted(requests, computed)


async def _samples(
    session: aiohttp.ClientSession, url: str
) -> list[tuple[str, dict[str, str], str]]:
    async with session.get(url) as response:
        text = await response.text()
    return [
        (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), value)
        for name, labels, value in _SAMPLE.findall(text)
    ]


# --- Playing --------------------------------------------------------------------------------------


@dataclass
class Answered:
    """One turn of a child; times in seconds."""

    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    engine: str | None = None


@dataclass
class Played:
    """One fan-out on one system.

    Attributes:
        children: each child's turns.
        whole_s: each child's time from its first turn's start to its last one's end.
        makespan_s: from the first child's start to the last one's end.
        shared_tokens: of the whole blocks that all first prompts begin with.
        spread: children's turns that each engine answered.
        counted_tokens: of children's prompts, what engines counted as computed; None: not told.
        lag_s: the longest that this process itself waited for a core.
    """

    system: str
    round: int
    count: int
    children: list[list[Answered]]
    whole_s: list[float]
    makespan_s: float
    shared_tokens: int
    spread: dict[str, int]
    counted_tokens: float | None
    lag_s: float
    failed: list[str]

    @property
    def shared_times(self) -> float:
        own = self.shared_tokens
        firsts = [turns[0] for turns in self.children if turns]
        computed = sum(one.prompt_tokens - one.cached_tokens for one in firsts)
        return (computed - sum(one.prompt_tokens - own for one in firsts)) / own

    @property
    def computed_tokens(self) -> int:
        return sum(one.prompt_tokens - one.cached_tokens for own in self.children for one in own)


async def play(
    session: aiohttp.ClientSession,
    system: System,
    fan: FanOut,
    shared_tokens: int,
    number: int,
    parents: bool,
) -> Played:
    """Run one fan-out to the end of its last child."""
    from experiments.agents import Refused, ask, end

    common = {"model": system.model, "seed": 1}
    said = [{"role": "system", "content": fan.parent_text}, {"role": "user", "content": "go on"}]
    await ask(session, system.url, said, _PARENT_TOKENS, {system.header: fan.parent}, **common)
    failed: list[str] = []
    ended: list[float] = []
    whole_s: list[float] = []

    async def child(one: Child) -> list[Answered]:
        await asyncio.sleep(one.delay_s)
        headers = {system.header: one.name} | ({_PARENT_HEADER: fan.parent} if parents else {})
        messages = [{"role": "system", "content": fan.system}]
        turns: list[Answered] = []
        began_s = time.perf_counter()
        for turn in one.turns:
            if turns:
                await asyncio.sleep(turn.tool_s)
            messages.append({"role": "user", "content": turn.text})
            try:
                answer = await ask(
                    session, system.url, messages, turn.output_tokens, headers,
                    **common,
                )  # fmt: skip
            except (Refused, aiohttp.ClientError, TimeoutError) as error:
                failed.append(f"{one.name}, turn {len(turns) + 1}: {error!r}")
                return turns
            usage = answer.usage
            if usage["completion_tokens"] != turn.output_tokens:
                failed.append(f"{one.name}: {usage['completion_tokens']} != {turn.output_tokens}")
                return turns
            details = usage.get("prompt_tokens_details") or {}
            turns.append(
                Answered(
                    answer.ttft_s,
                    answer.ended_s - answer.sent_s,
                    usage["prompt_tokens"],
                    details.get("cached_tokens") or 0,
                    answer.headers.get("x-conserve-decoder"),
                )
            )
            messages.append({"role": "assistant", "content": answer.text})
        ended.append(time.perf_counter())
        whole_s.append(ended[-1] - began_s)
        return turns

    lag_s = 0.0

    async def watch() -> None:
        nonlocal lag_s
        while True:
            due_s = time.perf_counter() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            lag_s = max(lag_s, time.perf_counter() - due_s)

    before = await counted(session, system)
    watching = asyncio.create_task(watch())
    began_s = time.perf_counter() + min(one.delay_s for one in fan.children)
    try:
        children = await asyncio.gather(*(child(one) for one in fan.children))
    finally:
        watching.cancel()
    makespan_s = max(ended, default=float("nan")) - began_s
    if system.haproxy is not None:
        # HAProxy counts an answer once its connection is done with it.
        await asyncio.sleep(0.2)
    after = await counted(session, system)
    spread = Counter(turn.engine for turns in children for turn in turns if turn.engine)
    if system.conserve:
        for name in (*(one.name for one in fan.children), fan.parent):
            await end(session, system.url, name)
    else:
        spread = after.requests - before.requests
    computed = None
    if after.computed is not None and before.computed is not None:
        computed = after.computed - before.computed
    return Played(
        system.name, number, len(fan.children), list(children), whole_s, makespan_s, shared_tokens,
        dict(spread), computed, lag_s, failed,
    )  # fmt: skip


async def measure(
    experiment: Any, systems: dict[str, System], found: list[Played], names: Sequence[str]
) -> None:
    from experiments.agents import clients
    from experiments.harness import rounds

    options = experiment.options
    shared = Shared(next(iter(systems.values())).model_source)
    async with clients(timeout_s=_TURN_S) as session:
        for number, count in [(-1, 2), *((n, c) for n in range(options.rounds) for c in options.n)]:
            fan = fan_out(f"{options.seed}-{number}-{count}", count, options.one_by_one)
            tokens = shared.tokens(fan)
            whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
            for _, name in rounds(names, 1, hash((options.seed, number, count))):
                await asyncio.sleep(options.settle)
                played = await play(
                    session, systems[name], fan, whole, number, not options.no_parents
                )
                about = f"round {number + 1}, N={count}, {name}"
                if number >= 0:
                    found.append(played)
                    _save(options, found)
                for why in played.failed:
                    experiment.console.print(f"[red]{about}: {why}[/red]")
                experiment.console.print(
                    f"{about}: {tokens} shared tokens, computed {played.shared_times:.2f} times, "
                    f"{played.makespan_s:.1f} s, turns {_spread(played)}, computed "
                    f"{played.computed_tokens} (counted {played.counted_tokens}), "
                    f"lag {played.lag_s * 1e3:.0f} ms",
                    highlight=False,
                )


# --- Results --------------------------------------------------------------------------------------


def _spread(played: Played) -> str:
    return "/".join(str(count) for count in sorted(played.spread.values(), reverse=True))


def _save(options: argparse.Namespace, found: Sequence[Played]) -> None:
    if options.json is not None:
        shown = {
            "options": {key: str(value) for key, value in vars(options).items()},
            "found": [
                asdict(one)
                | {"shared_times": one.shared_times, "computed_tokens": one.computed_tokens}
                for one in found
            ],
        }
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


def show(experiment: Any, found: Sequence[Played], names: Sequence[str]) -> None:
    """Print a table for each N, and ratios to the first system in the same rounds."""
    from experiments.harness import group, percentile, ratio_cells

    for count, ones in sorted(group(found, lambda one: one.count).items()):
        by = group(ones, lambda one: one.system)
        rows, ratios = [], []
        for name in (name for name in names if name in by):
            mine = by[name]
            firsts = [turns[0] for one in mine for turns in one.children if turns]
            later = [turn for one in mine for turns in one.children for turn in turns[1:]]
            row = [name, f"{mean(one.shared_times for one in mine):.2f}"]
            row.append(f"{mean(one.computed_tokens for one in mine):,.0f}")
            for values in (
                [one.ttft_s for one in firsts],
                [one.latency_s for one in firsts],
                [one.ttft_s for one in later],
                [value for one in mine for value in one.whole_s],
            ):
                row += [f"{percentile(values, q):.3f}" if values else "" for q in (0.5, 0.95)]
            row.append(f"{median(one.makespan_s for one in mine):.2f}")
            row.append(" ".join(_spread(one) for one in mine))
            row.append(str(sum(len(one.failed) for one in mine)))
            rows.append(row)
            base = by.get(names[0])
            if base and len(base) == len(mine) and not any(one.failed for one in (*base, *mine)):
                cells = [name]
                for value in (
                    lambda one: median(turns[0].ttft_s for turns in one.children),
                    lambda one: max(turns[0].ttft_s for turns in one.children),
                    lambda one: median(one.whole_s),
                    lambda one: one.makespan_s,
                ):
                    pair = [value(one) for one in mine], [value(one) for one in base]
                    cells += ratio_cells(pair[0], pair[1] if mine is not base else pair[0])
                ratios.append(cells)
        columns = ["system", "shared x", "computed", "TTFT p50", "p95", "1st turn p50", "p95"]
        columns += ["later TTFT p50", "p95", "whole p50", "p95", "makespan", "turns by engine", "f"]
        title = f"N = {count}, {len(ones) // max(1, len(by))} rounds; seconds"
        experiment.show(title, columns, rows)
        columns = ["system", "TTFT", "95 %", "slowest TTFT", "95 %", "whole", "95 %", "makespan"]
        experiment.show(
            f"N = {count}, over {names[0]} in the same round", [*columns, "95 %"], ratios
        )


def at_trees(text: str) -> tuple[str, Path, list[str]]:
    """Read NAME=WORKTREE[,SETTING=VALUE]."""
    name, separator, rest = text.partition("=")
    tree, *settings = rest.split(",")
    if not separator or not (Path(tree) / "conserve").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=WORKTREE[,SETTING=VALUE]")
    return name, Path(tree).resolve(), settings


def go_first() -> None:
    """Have this process run before all others, as if it had a machine to itself.

    Where each core has an engine it is else kept waiting for as long as both compute prompts (0.4 s
    were seen), which looks like a slow first token. What it starts is not affected.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Have all that is started meanwhile go before other sessions, as before niced programs.

    A kernel that shares out cores by session (autogroups) gives each session as much, however nice
    its processes are.
    """
    done, over = {os.getsid(0)}, threading.Event()

    def look() -> None:
        while not over.wait(2.0):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(OSError):
                    if (session := os.getsid(process.pid)) not in done:
                        Path(f"/proc/{process.pid}/autogroup").write_text("-10")
                        done.add(session)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def model_of(text: str) -> str:
    """Return the model; /tmp/realN is made, with N layers in Qwen3-0.6B's shape."""
    if (made := re.fullmatch(r".*/real(\d+)", text)) and not Path(text).exists():
        from tests.engines.real_shape import make_real_shape

        make_real_shape(Path(text), layers=int(made[1]))
    return text


def main() -> None:
    if sys.argv[1:2] == ["--apart"]:
        apart(sys.argv[2], sys.argv[3:])
        return
    from conserve_lab.peers import PEERS, Options
    from conserve_lab.peers.plan import free_port
    from experiments.harness import Experiment

    experiment = Experiment("fanout", __doc__, width=170, rounds=3, seed=1)
    experiment.option("--peers", "", f"with commas between: {', '.join([*PEERS, *extra_peers()])}")
    experiment.option("--n", [1, 4, 8], "children of a family")
    experiment.option("--engines", 2, "of each system")
    experiment.option("--cores", "0,1", "an engine each; '': not pinned, as with more engines")
    experiment.option("--model", "embedded", "or a path", type=str)
    experiment.option("--host-gib", 1.0, "of host memory for KV, of systems that have some")
    experiment.option("--settle", 1.0, "seconds before each fan-out")
    add = experiment.parser.add_argument
    add("--system", type=at_trees, action="append", default=[], metavar="NAME=WORKTREE",
        help="ConServe from a tree; may be repeated")  # fmt: skip
    add("--no-parents", action="store_true", help="children do not name their parent")
    add("--one-by-one", action="store_true", help=f"children begin {_APART_S:g} s apart")
    add("--json", type=Path, help="write all that was measured to this file")
    options = experiment.parse()
    cores = tuple(int(one) for one in options.cores.split(",")) if options.cores else None
    if cores and len(cores) != options.engines:
        cores = None
    here = Path(PEERS["conserve"].__code__.co_filename).parents[2]
    wanted = [(name, "conserve", tree, settings) for name, tree, settings in options.system]
    wanted += [(name, name, here, []) for name in filter(None, options.peers.split(","))]
    names = [name for name, *_ in wanted]
    if not names or len(set(names)) < len(names):
        experiment.parser.error("give systems, each under a name of its own")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    go_first()
    found: list[Played] = []
    try:
        with ExitStack() as stack:
            systems: dict[str, System] = {}
            starting = stack.enter_context(ExitStack())
            starting.enter_context(preferred())
            for name, peer, tree, settings in wanted:
                if psutil.virtual_memory().available < _LEAST_FREE_BYTES:
                    raise SystemExit(f"too little memory is free to start {name}: give fewer")
                since_s = time.monotonic()
                given = Options(
                    engines=options.engines, model=model_of(options.model), port=free_port(),
                    cores=cores, logs=experiment.logs / name, host_gib=options.host_gib,
                )  # fmt: skip
                say = experiment.console.print
                systems[name] = stack.enter_context(started(name, peer, tree, settings, given, say))
                free_gib = psutil.virtual_memory().available / 2**30
                took_s = time.monotonic() - since_s
                say(f"{name} is up after {took_s:.0f} s; {free_gib:.1f} GiB free", highlight=False)
            # Its last look finds all sessions.
            time.sleep(3.0)
            starting.close()
            asyncio.run(measure(experiment, systems, found, names))
    finally:
        if found:
            show(experiment, found, names)
    if any(one.failed for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
