"""``python -m conserve_lab.peers``: start one peer, list them all, or find a chunk size."""

import asyncio
import json
import signal
import threading
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from conserve_cli.output import new_console
from conserve_lab.peers.chunks import iterations, largest_chunk
from conserve_lab.peers.plan import DEFAULT_WRONG_DECISION_RATE, Options, PeerUnavailable
from conserve_lab.peers.running import Peer
from conserve_lab.peers.running import start as running
from conserve_lab.peers.systems import PEERS

peers = typer.Typer(
    help="Start what ConServe is compared with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = new_console()


@peers.command("list")
def list_peers() -> None:
    """Say what each peer is, and with which settings it is started."""
    table = Table("peer", "what it is, and its settings", show_lines=True)
    for name, peer in PEERS.items():
        paragraphs = (getdoc(peer) or "").split("\n\n")
        told = [" ".join(paragraph.split()) for paragraph in paragraphs]
        table.add_row(name, escape("\n".join(told)))
    console.print(table)


@peers.command()
def start(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(PEERS)}.")],
    engines: Annotated[int, typer.Option(help="Engine replicas in all.")] = 2,
    model: Annotated[str, typer.Option(help="Path or id; embedded: no download.")] = "embedded",
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A vLLM engine argument; the value as JSON."),
    ] = None,
    port: Annotated[int, typer.Option(help="Of the server, on loopback.")] = 8000,
    cores: Annotated[
        str | None, typer.Option(metavar="0,1", help="A core for each engine.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "gpu"], typer.Option()] = "auto",
    wrong_decision_rate: Annotated[
        float, typer.Option(help="Of per_turn: share of later turns sent to a prefiller.")
    ] = DEFAULT_WRONG_DECISION_RATE,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Of collocated and elastic: most tokens of a step.")
    ] = None,
    host_gib: Annotated[
        float, typer.Option(help="Host memory for KV, of systems that have some.")
    ] = Options.host_gib,
    logs: Annotated[Path | None, typer.Option(help="Folder for logs.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write how it was started to this file.")
    ] = None,
) -> None:
    """Start a peer, say where it is, and stop it on Ctrl-C."""
    # A shell starts its background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        options = Options(
            engines=engines,
            model=model,
            engine=_engine_arguments(engine or []),
            port=port,
            cores=_numbers(cores),
            device=device,
            logs=logs,
            wrong_decision_rate=wrong_decision_rate,
            chunk_tokens=chunk_tokens,
            host_gib=host_gib,
        )
        with running(name, options, lambda text: console.print(f"  {text}")) as peer:
            if json_path is not None:
                json_path.write_text(json.dumps(peer.described, indent=2) + "\n")
            _tell(peer)
            threading.Event().wait()
    except ValueError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(2) from None
    except PeerUnavailable as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopped.")
        raise typer.Exit(130) from None


@peers.command()
def chunk(
    url: Annotated[str, typer.Argument(help="Of an idle bare engine: the peer vllm, one engine.")],
) -> None:
    """Measure iterations, and find the chunk for collocated by the paper's rule."""
    try:
        served = httpx.get(url + "/v1/models", timeout=15).raise_for_status().json()["data"]
        points, decode_step_s = asyncio.run(iterations(url, served[0]["id"]))
    except httpx.HTTPError as error:
        console.print(f"[red]{escape(url)}: {escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None
    table = Table("tokens prefilled", "iteration, ms", "decode steps")
    for tokens, step_s in points:
        table.add_row(str(tokens), f"{step_s * 1e3:.1f}", f"{step_s / decode_step_s:.1f}")
    console.print(table)
    console.print(f"Decode step without load: {decode_step_s * 1e3:.2f} ms.", highlight=False)
    try:
        console.print(f"--chunk-tokens {largest_chunk(points, decode_step_s)}", highlight=False)
    except ValueError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(1) from None


def _tell(peer: Peer) -> None:
    console.print(f"{peer.name} is ready at {peer.url}, model {peer.model}:", highlight=False)
    header = f" --conversation-header {peer.session_header}" if peer.session_header else ""
    # The default of `conserve bench`.
    header = "" if peer.session_header == "X-Conversation-Id" else header
    lengths = "" if peer.min_tokens else " --no-min-tokens"
    console.print(f"  conserve bench run {peer.name}={peer.url}{header}{lengths}", highlight=False)
    console.print(f"Logs are in {escape(peer.described['logs'])}. Ctrl-C ends it.")


def _engine_arguments(given: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for item in given:
        name, separator, text = item.partition("=")
        if not name or not separator:
            raise ValueError(f"--engine {item}: not NAME=VALUE")
        try:
            arguments[name] = json.loads(text)
        except ValueError:
            arguments[name] = text
    return arguments


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--cores {text}: not numbers with commas between") from None


if __name__ == "__main__":
    peers()
