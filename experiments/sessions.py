"""Whole recorded sessions on real engines: ConServe and what one would run instead.

One system after the other is started, in a random order in each round, with engines alike and host
memory alike. As many sessions are under way as are asked for: where one ends the next begins, in an
order that all systems share, with all of its turns. Tokens and pauses are both multiplied by
``--scale``, and nothing else is changed: as a session has a fiftieth of its tokens, it takes a
fiftieth of its time. A session ends before its first prompt that no engine's KV has room for.
Columns are those of ``experiments.corpus``. A turn that is refused ends its session, as a client
would. With ``--aiperf`` AIPerf's AgentX scenario drives instead (`experiments.aiperf`).
"""

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import load_profile
from conserve.engines import model_source
from conserve.settings import EMBEDDED_MODEL, load
from conserve_lab.client import Endpoint
from conserve_lab.driver import DriveOptions, drive
from conserve_lab.peers import Options, PeerUnavailable, start
from conserve_lab.records import TurnRecord
from conserve_lab.workloads import Arrivals, Changes, Workload, recorded
from experiments import aiperf
from experiments.corpus import COLUMNS, VOCABULARY, Run, cells, found_in, replay
from experiments.harness import Experiment, at_least_1, rounds

_PORT = 8000
CONSERVE = "conserve"
# And what stands for them in the simulator.
SYSTEMS = {
    CONSERVE: "conserve",
    "vllm_lmcache": "thunderagent + host",
    "vllm_lmcache_hash": "affinity + host",
    "vllm_router": "thunderagent",
    "ray_serve_llm": "affinity",
    "vllm": "least loaded",
}
# More than begin in any run.
_SESSIONS = 1_000
_BLOCK_TOKENS = 128


@contextlib.contextmanager
def serving(experiment: Experiment, system: str) -> Iterator[Endpoint]:
    """Serve with a system for the time of a ``with`` block.

    Raises:
        PeerUnavailable: it cannot run here.
    """
    chosen = experiment.options
    longest_tokens = _longest_tokens(chosen.blocks)
    engine = {"num_gpu_blocks_override": chosen.blocks, "max_model_len": longest_tokens}
    if system == CONSERVE:
        own = [f"engine.{name}={value}" for name, value in engine.items()]
        own += [f"lmcache.size_gb={chosen.host_gib}", "engine.enable_prompt_tokens_details=true"]
        count = chosen.engines - 1
        with experiment.serving(
            f"model={chosen.model}", *own, prefillers=count, port=_PORT, name=system
        ) as url:
            yield Endpoint(system, url, load({"model": chosen.model}).model_id)
        return
    options = Options(
        engines=chosen.engines,
        model=chosen.model,
        engine=engine,
        port=_PORT,
        host_gib=chosen.host_gib,
        logs=experiment.logs,
    )
    with start(system, options, experiment.console.print) as peer:
        headers = () if peer.session_header is None else (peer.session_header,)
        yield Endpoint(
            system, peer.url, peer.model, conversation_headers=headers, release=False,
            min_tokens=peer.min_tokens,
        )  # fmt: skip


def _longest_tokens(blocks: int) -> int:
    """Return the longest prompt that an engine takes; vLLM keeps a block to itself."""
    return (blocks - 1) * _BLOCK_TOKENS


def workload(data: Path, scale: float, longest_tokens: int, seed: int) -> Workload:
    changes = Changes(scale_tokens=scale, scale_gaps=scale, max_context_tokens=longest_tokens)
    return recorded(
        data,
        sessions=_SESSIONS,
        arrivals=Arrivals("together"),
        vocabulary=VOCABULARY,
        changes=changes,
        seed=seed,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("sessions", __doc__, width=150, seed=1, rounds=1, data=True)
    experiment.option("--systems", ",".join(SYSTEMS))
    experiment.option("--engines", 1, "1: one that does everything; 2: ConServe has a prefiller")
    experiment.option("--agents", 24, "sessions at a time", type=at_least_1)
    experiment.option("--scale", 0.02, "of tokens and of pauses")
    experiment.option("--blocks", 96, "of KV of each engine")
    experiment.option("--host-gib", 0.1, "of host memory for KV, of systems that have some")
    experiment.option("--model", EMBEDDED_MODEL)
    experiment.option("--settle", 60.0, "seconds that are not counted")
    experiment.option("--seconds", 1200.0, "that are counted after that")
    experiment.option("--profile", "", "of the model on this machine: simulate the same, too")
    about = "AIPerf 0.13's program; it warms up by itself"
    experiment.option("--aiperf", None, about, type=Path, metavar="FILE")
    options = experiment.parse(arguments)
    if options.data is None:
        experiment.parser.error("--data: give a folder of recorded sessions")
    chosen = options.systems.split(",")
    if unknown := set(chosen) - set(SYSTEMS):
        known = ", ".join(SYSTEMS)
        experiment.parser.error(f"--systems: no {', '.join(sorted(unknown))}; there are {known}")
    load({"model": options.model})
    if options.profile:
        load_profile(options.profile)
    until_s = options.settle + options.seconds
    if options.aiperf:
        if not options.aiperf.is_file():
            experiment.parser.error(f"--aiperf: no file {options.aiperf}")
        aiperf.scale(options.data, experiment.logs / "traces")
    by_system: dict[str, list[TurnRecord]] = {}
    by_aiperf: list[list[str]] = []
    for number, name in rounds(chosen, options.rounds, options.seed):
        try:
            with (
                serving(experiment, name) as endpoint,
                experiment.console.status(f"{name}, round {number + 1}, {until_s:g} s"),
            ):
                if options.aiperf:
                    by_aiperf.append([name, *_by_aiperf(experiment, endpoint, number)])
                else:
                    by_system.setdefault(name, []).extend(_drive(experiment, endpoint, number))
        except PeerUnavailable as error:
            experiment.console.print(f"{name}: {error}", style="yellow")
        experiment.save(by_aiperf or by_system)
    if options.aiperf:
        title = f"AIPerf's AgentX, tokens and times by 64, {options.agents} at a time; not valid"
        experiment.show(title, ["system", *aiperf.COLUMNS], by_aiperf, box=SIMPLE_HEAD)
        return
    rows = []
    for name in (one for one in chosen if one in by_system):
        for row, records in ((name, by_system[name]), *_simulated(options, name)):
            found = found_in(records, options.settle, until_s)
            rows.append([row, f"{found.turns:,} ({found.first_turns:,})", *cells(found)])
    title = f"sessions at {options.scale:g} of their tokens and pauses, {options.agents} at a time"
    experiment.show(title, ["system", "turns (first)", *COLUMNS], rows, box=SIMPLE_HEAD)


def _simulated(options: Namespace, name: str) -> Iterator[tuple[str, list[TurnRecord]]]:
    """Yield the first round's turns in the simulator, if there is a profile."""
    if not options.profile:
        return
    longest_tokens = _longest_tokens(options.blocks)
    profile = load_profile(options.profile)
    held_bytes = options.host_gib * 2**30 / options.engines
    run = Run(
        str(options.data), options.profile, SYSTEMS[name], options.engines, options.agents,
        int(held_bytes / profile.handoff.bytes_per_token), options.seed,
    )  # fmt: skip
    profile = profile.model_copy(update={"kv_capacity_tokens": longest_tokens})
    sessions = workload(options.data, options.scale, longest_tokens, options.seed)
    until_s = options.settle + options.seconds
    yield f"{SYSTEMS[name]}, simulated", replay(run, profile, sessions, until_s, 0.0)[0]


def _drive(experiment: Experiment, endpoint: Endpoint, number: int) -> list[TurnRecord]:
    options = experiment.options
    longest_tokens = _longest_tokens(options.blocks)
    sessions = workload(options.data, options.scale, longest_tokens, options.seed + number)
    until_s = options.settle + options.seconds
    chosen = DriveOptions(duration_s=until_s, concurrency=options.agents)
    run = asyncio.run(drive(endpoint, sessions, chosen, proven=True))
    if warning := run.lag.warning():
        experiment.console.print(f"{endpoint.system}: {warning}", style="yellow")
    return run.records


def _by_aiperf(experiment: Experiment, endpoint: Endpoint, number: int) -> list[str]:
    options = experiment.options
    # The chat template adds to each of a prompt's messages.
    most_tokens = int(0.8 * _longest_tokens(options.blocks))
    return aiperf.run(
        options.aiperf, endpoint, Path(model_source(options.model)), experiment.logs,
        **{"concurrency": options.agents, "benchmark-duration": options.seconds,
           "random-seed": options.seed + number, "max-context-length": most_tokens},
    )  # fmt: skip


if __name__ == "__main__":
    main()
