"""Many agents with real tools, while processes are killed beneath them."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from conserve.settings import Settings
from conserve_tools.backends import FIRST_PORT
from conserve_tools.client import Agent, Environment, EnvironmentRefused
from conserve_tools.root import folder_of, folders
from conserve_tools.sandbox import marked
from conserve_tools.service import UNCLAIMED_S
from conserve_tools.spec import MOST_PORTS
from deployments.node.lmcache_server import is_free
from tests.engines.client import engines
from tests.engines.processes import kill, processes

ROOT = folder_of(Settings())
MODEL = "conserve-embedded"
TURNS = 3
# What a test's server does, and does not end by itself.
_LISTENS = (
    "import os, socket, time; s = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))"
)
# As a client that means it: a router is away for up to a minute on a busy machine.
_RETRIES = 12


@dataclass
class Seen:
    """What a run has come to.

    Attributes:
        cut: commands that were ended with the manager, and run again.
        failures: what agents could not do.
    """

    done: int = 0
    cut: int = 0
    failures: list[str] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def run(url: str, agents: int, at_once: int, wait_until_whole: Callable[[], None]) -> Seen:
    """Have agents work, so many at a time, and kill one process of each kind in between.

    Args:
        wait_until_whole: returns when every engine is there.
    """
    seen = Seen()
    ended = threading.Event()
    killer = threading.Thread(target=_kill, args=(seen, agents, ended, wait_until_whole))
    killer.start()
    try:
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda number: _work(url, number, seen), range(agents)))
    finally:
        ended.set()
        killer.join()
    return seen


def _work(url: str, number: int, seen: Seen) -> None:
    try:
        with Agent(url, f"agent-{number}", max_retries=_RETRIES) as agent:
            env = agent.environment(ports=1)
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"agent {number}, step {turn}: go on"})
                reply = agent.openai.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=8,
                    temperature=0,  # type: ignore[arg-type]
                )
                said = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": said})
                # Each step needs the one before: a workspace that was lost would show.
                before = f"test -e step{turn - 1} || exit 9; " if turn else ""
                script = f"{before}echo {number} > step{turn}; setsid sleep 300 & cat step*"
                if turn == 0:
                    script = f'setsid python3 -SEc "{_LISTENS}; time.sleep(300)" & {script}'
                result = _ran(env, script, seen)
                if result != f"{number}\n" * (turn + 1):
                    raise AssertionError(f"turn {turn}: the workspace has {result!r}")
    except Exception as error:
        with seen.lock:
            seen.failures.append(f"agent {number}: {type(error).__name__}: {error}")
    finally:
        with seen.lock:
            seen.done += 1


def _ran(env: Environment, script: str, seen: Seen) -> str:
    while True:
        try:
            result = env.run(script, tool="bash")
        except EnvironmentRefused as error:
            if error.code != "command_cut":
                raise
            with seen.lock:
                seen.cut += 1
            continue
        if result.exit_code:
            raise AssertionError(f"exit code {result.exit_code}: {result.output}")
        return result.stdout


def _kill(
    seen: Seen, agents: int, ended: threading.Event, wait_until_whole: Callable[[], None]
) -> None:
    victims: dict[str, Callable[[], int]] = {
        "manager": lambda: processes("ray::EnvironmentService")[0].pid,
        "table": lambda: processes("ray::TableActor")[0].pid,
        "router": lambda: processes("ray::ServeReplica:default:Router")[0].pid,
        "decoder": lambda: engines("decoder")[0]["pid"],
    }
    for number, (name, find) in enumerate(victims.items(), 1):
        while seen.done < agents * number / (len(victims) + 1):
            if ended.wait(0.2):
                return
        wait_until_whole()
        kill(find())
        seen.kills.append(name)


@dataclass(frozen=True)
class Ground:
    """What is there before agents come, and has to be all that is there afterwards."""

    shared_memory: frozenset[str]
    taken_ports: frozenset[int]

    @classmethod
    def now(cls) -> "Ground":
        """What is there now."""
        return cls(frozenset(os.listdir("/dev/shm")), _taken_ports())

    def left(self, timeout_s: float = UNCLAIMED_S + 75) -> list[str]:
        """What is left of environments and engines after so long; empty if nothing is."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left = [path.name for path in folders(ROOT)]
            left += [str(process) for process in marked(f"{ROOT}:")]
            left += [str(process) for process in processes(r"sleep 300|time\.sleep\(300\)")]
            left += [f"port {port}" for port in sorted(_taken_ports() - self.taken_ports)]
            left += sorted(frozenset(os.listdir("/dev/shm")) - self.shared_memory)
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(0.5)


def _taken_ports() -> frozenset[int]:
    """Of the ports that environments get."""
    ports = range(FIRST_PORT, FIRST_PORT + Settings().environments.most * MOST_PORTS)
    return frozenset(port for port in ports if not is_free("127.0.0.1", port))
