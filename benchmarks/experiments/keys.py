"""What keys cost: warm turns with a key, against the same without any.

    python -m benchmarks.experiments.keys [--rounds 40] [--json PATH]

One application (one prefiller, one decoder), and before it two routers that differ in nothing but
the key file: both ask the same conversation table and pass the same decoder's answers on. They are
measured in turn, in random order, round after round, as `benchmarks.experiments.overhead` does;
ratios are medians over rounds with a bootstrap interval of 95 %. The tenant has every limit, and
reaches none.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import uvicorn
from rich.progress import Progress

from benchmarks.experiments.overhead import WarmTurns, measure, paired_ratio, report
from conserve.console import new_console
from conserve.launch import Launch
from conserve.settings import Settings
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from deployments.loopback import find_on_loopback
from deployments.router.frontdoor import FrontDoor
from deployments.table.table_client import TableClient

APPLICATION = "http://127.0.0.1:8000"
OFF, ON = "no keys", "keys"
PORTS = {OFF: 8191, ON: 8192}
_DAY = "2026-01-01"


class _RunningTable(TableClient):
    """The table of the application that runs, whatever its settings have become."""

    def _connect(self) -> Any:
        if self._actor is None:
            found = [
                one["name"]
                for one in ray.util.list_named_actors(all_namespaces=True)
                if one["namespace"] == "serve" and str(one["name"]).startswith("conserve:")
            ]
            (name,) = [one for one in found if ":table:" in one]
            self._actor = ray.get_actor(name, namespace="serve")
        return self._actor


def door(port: int, keys_file: Path | None) -> None:
    """Serve as a router of the application that runs, until this process is ended."""
    find_on_loopback("auto")
    ray.init(address="auto", namespace="serve", log_to_driver=False)
    settings = Settings(keys_file=None if keys_file is None else str(keys_file))
    front = FrontDoor(settings, _RunningTable("", settings), f"door-{port}")
    # As `deployments.router.router` has it.
    uvicorn.run(
        front,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        server_header=False,
    )


def make_keys(path: Path) -> str:
    """Write a key file with one tenant, that has every limit; returns its key."""
    content, key = KeyFile.new().with_key("bench", _DAY)
    limits = Limits(turns=10**6, held_tokens=10**9, conversations=10**6, new_per_minute=10**6)
    keyfile.write(path, content.with_tenant("bench", Tenant(limits)))
    return key


def _door_process(system: str, folder: Path, keys_file: Path | None) -> Launch:
    command = [sys.executable, "-m", "benchmarks.experiments.keys", "--door", str(PORTS[system])]
    if keys_file is not None:
        command += ["--keys-file", str(keys_file)]
    return Launch([], folder / f"{system.replace(' ', '-')}.log", None, command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--door", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--keys-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.door is not None:
        door(options.door, options.keys_file)
        return
    console = new_console(least_width=110)
    folder = Path(tempfile.mkdtemp(prefix="conserve-keys-"))
    key = make_keys(folder / "keys.json")
    application = Launch(["decoders=1"], folder / "conserve.log")
    doors = [_door_process(OFF, folder, None), _door_process(ON, folder, folder / "keys.json")]
    systems = {name: f"http://127.0.0.1:{port}" for name, port in PORTS.items()}
    headers = {ON: {"Authorization": f"Bearer {key}"}}
    results: dict[int, dict[str, WarmTurns]] = {}
    try:
        with console.status(f"starting the application (logs: {folder})"):
            application.__enter__()
            application.wait_until_serving(APPLICATION, 1, 1)
            for process, url in zip(doors, systems.values(), strict=True):
                process.__enter__()
                process.wait_until_serving(url, 1, 1, timeout_s=120)
        with Progress(console=console) as progress:
            for clients in options.clients:
                results[clients] = asyncio.run(
                    measure(systems, clients, options.rounds, progress, options.seed, headers)
                )
        report(results, console, base=OFF)
    finally:
        for process in (*doors, application):
            process.stop()
    if options.json:
        body = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "ratios": {
                clients: paired_ratio(found[ON], found[OFF]) for clients, found in results.items()
            },
            "samples": {
                clients: {name: asdict(samples) for name, samples in found.items()}
                for clients, found in results.items()
            },
        }
        options.json.write_text(json.dumps(body) + "\n")


if __name__ == "__main__":
    main()
