"""Many conversations on real engines, and ``kill -9``: see ``--help``, or ``make test-chaos``."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deployments.node.kv_files import FOLDER
from tests.acceptance.chaos.answers import compare
from tests.acceptance.chaos.plan import VICTIMS, Plan
from tests.acceptance.chaos.run import COUNTED, run
from tests.acceptance.chaos.tally import Tally
from tests.acceptance.chaos.traces import Traces
from tests.engines.applications import MAIN
from tests.engines.lone import LONE_PORT, lone_engine, wait_for_lone
from tests.engines.stage import Stage

_REPORT_S = 30.0


def main() -> int:
    """Returns 0 if all held, 1 if not."""
    asked = _arguments()
    console = Console(highlight=False, soft_wrap=True)
    logs = Path(asked.logs or tempfile.mkdtemp(prefix="conserve-chaos-"))
    plan = Plan(
        asked.seed, asked.conversations, asked.minutes * 60, asked.kill_every, tuple(asked.victims)
    )
    tally = Tally(lambda text: console.print(f"{_clock(tally)}  {text}"))
    application = replace(
        MAIN,
        name="chaos",
        arguments=(
            *MAIN.arguments,
            f"decoders={asked.decoders}",
            "routers=2",
            # So small that files are evicted.
            f"lmcache.disk.path={logs}",
            "lmcache.disk.size_gb=0.2",
            "lmcache.disk.written_gb_per_day=0",
            # Those whose clients have left for good make room.
            "idle_timeout_s=120",
            *asked.settings,
        ),
        decoders=asked.decoders,
        lone_engine=False,
    )
    console.print(f"chaos with seed {plan.seed}; logs are in {logs}")
    traces, stage = Traces(logs), Stage(logs)
    try:
        console.print("starting engines")
        url = stage.use(application)
        kills, disk = plan.kills(), logs / FOLDER
        played = run(plan, kills, url, stage, asked.decoders, tally, traces, disk)
        asyncio.run(_watched(console, plan, tally, played))
    finally:
        stage.clear()
    console.print(f"{_clock(tally)}  comparing {len(tally.answers)} answers with a lone engine's")
    lone = lone_engine(logs / "lone.log")
    try:
        wait_for_lone(lone, logs)
        asyncio.run(compare(tally, f"http://127.0.0.1:{LONE_PORT}"))
    finally:
        lone.stop()
    for left in traces.left():
        tally.fail(f"left behind: {left}")
    console.print(_summary(plan, tally))
    for failure in tally.failures:
        console.print(f"FAILED: {failure}"[:500], style="red")
    return 1 if tally.failures else 0


async def _watched(
    console: Console, plan: Plan, tally: Tally, played: Coroutine[Any, Any, None]
) -> None:
    playing = asyncio.ensure_future(played)
    while not playing.done():
        console.print(
            f"{_clock(tally)} of {plan.duration_s / 60:g} min  {tally.live} conversations live, "
            f"{tally.ended} ended, {tally.turns} turns, {tally.retries.total()} retries, "
            f"{tally.kills.total()} kills, {tally.cut.total()} streams cut, "
            f"{len(tally.failures)} failures"
        )
        await asyncio.wait([playing], timeout=_REPORT_S)
    playing.result()


def _clock(tally: Tally) -> str:
    minutes, seconds = divmod(int(time.monotonic() - tally.began_s), 60)
    return f"{minutes:3d}:{seconds:02d}"


def _summary(plan: Plan, tally: Tally) -> Table:
    table = Table("what", "how often", title=f"chaos, seed {plan.seed}")
    rows = [
        ("conversations ended", tally.ended),
        ("turns answered", tally.turns),
        ("of them streamed", tally.streams),
        *((f"misdeed: {name}", n) for name, n in sorted(tally.misdeeds.items())),
        *((f"retry: {name}", n) for name, n in sorted(tally.retries.items())),
        *((f"killed: {name}", n) for name, n in sorted(tally.kills.items())),
        *((f"not killed (not there, or the last): {n}", c) for n, c in tally.skipped.items()),
        *((f"streams cut: {name}", n) for name, n in sorted(tally.cut.items())),
        *((f"metric: {name}", tally.counted[name]) for name in COUNTED),
        ("wrong answers", tally.wrong),
        ("answers that differ by a tie", tally.ties),
        ("failures", len(tally.failures)),
    ]
    for name, count in rows:
        table.add_row(name, str(count))
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-chaos ARGS=...", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="default: 20")
    parser.add_argument("--conversations", type=int, default=64, help="at a time; default: 64")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument(
        "--kill-every", type=float, default=25.0, help="mean seconds between kills; 0: none"
    )
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--decoders", type=int, default=2, help="default: 2")
    parser.add_argument("--logs", help="folder for logs; default: a temporary one")
    parser.add_argument("settings", nargs="*", help="further settings, as `name=value`")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
