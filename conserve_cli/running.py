"""Commands that look at a running application, and act on it: ``conserve top``, for example."""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from conserve.loopback import is_loopback
from conserve_cli.output import console, ended_by_signals, refuse
from conserve_cli.surroundings import forget_proxies

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Url = Annotated[str, typer.Argument(help="URL of a running application.")]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="CONSERVE_API_KEY", help="An API key, where there are keys."),
]
Tenant = Annotated[str | None, typer.Option(help="The conversation's tenant, for an admin key.")]
URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 15.0
EVERY_S = 2.0
# Times, cache hits and slow turns are those of the last minute.
_RECENT_S = 60.0
_MOST_CONVERSATIONS = 1000
_MOST_SLOW = 5
_MOST_NAMES = 3
_BAR_CHARS = 24

Json = dict[str, Any]
Samples = Mapping[tuple[str, str], float]
"""The values of metrics by name and the label that tells them apart, which may be empty."""


class Unanswered(Exception):
    """An application gave no answer that can be used.

    Attributes:
        refused: whether it will not answer later, either: a key is wrong, for example.
    """

    def __init__(self, problem: str, *, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


class Seen(NamedTuple):
    """Answers of an application at one time."""

    at_s: float
    engines: list[Json]
    conversations: list[Json]
    total: int
    samples: Samples


@cli.command()
def top(url: Url = URL, key: Key = None) -> None:
    """Watch a running application's engines, what waits, and its times, until Ctrl-C.

    In a pipe or a file it prints once.
    """
    recent: deque[Seen] = deque()
    with ended_by_signals(), application(url, key) as client:
        recent.append(_look(client))
        if not console.is_terminal:
            console.print(screen(recent))
            return
        try:
            with Live(screen(recent), console=console, auto_refresh=False, screen=True) as live:
                while True:
                    time.sleep(EVERY_S)
                    live.update(next_screen(client, recent), refresh=True)
        except KeyboardInterrupt:
            return


def next_screen(client: httpx.Client, recent: deque[Seen]) -> RenderableType:
    """Look once more, and return the view; without an answer, the last one and what is wrong.

    Raises:
        Unanswered: it will not answer later, either.
    """
    try:
        seen = _look(client)
    except Unanswered as error:
        if error.refused:
            raise
        return Group(Text(f"{error}; trying again. Last seen:", "bold red"), screen(recent))
    prompts = (_TOKENS[0], "")
    if seen.samples.get(prompts, 0.0) < recent[-1].samples.get(prompts, 0.0):
        recent.clear()  # Counters have begun again with another process.
    recent.append(seen)
    while seen.at_s - recent[0].at_s > _RECENT_S:
        recent.popleft()
    return screen(recent)


@cli.command()
def ps(url: Url = URL, key: Key = None) -> None:
    """List a running application's conversations, those used last first."""
    with application(url, key) as client:
        answer = asked(client, "GET", f"/v1/conversations?limit={_MOST_CONVERSATIONS}")
    console.print(conversations_table(answer["data"]))
    if answer["total"] > len(answer["data"]):
        console.print(f"{answer['total']:,} in all.", highlight=False)


@cli.command()
def cache(
    url: Url = URL,
    key: Key = None,
    minutes: Annotated[int, typer.Option(min=1, max=60, help="Look back so far.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Say why a running application's engines computed prompt tokens again, and what to do."""
    with application(url, key) as client:
        answer = asked(client, "GET", f"/v1/cache?minutes={minutes}")
    if as_json:
        console.print_json(data=answer)
    else:
        console.print(cache_tables(answer))


@cli.command()
def end(
    conversation: Annotated[str, typer.Argument(help="The conversation's id.", metavar="ID")],
    url: Url = URL,
    tenant: Tenant = None,
    key: Key = None,
) -> None:
    """End a conversation; what it holds comes free at once."""
    of = "" if tenant is None else f"?tenant={quote(tenant, safe='')}"
    with application(url, key) as client:
        asked(client, "DELETE", f"/v1/conversations/{quote(conversation, safe='')}{of}")
    console.print(f"Ended {escape(conversation)}.", highlight=False)


@cli.command()
def drain(
    engine: Annotated[str, typer.Argument(help="The engine's id, as `conserve top` shows it.")],
    url: Url = URL,
    key: Key = None,
) -> None:
    """Move an engine's conversations to others between turns, and give it nothing new.

    Its process stays, and so does this state until the engine or the conversation table ends.
    """
    with application(url, key) as client:
        answer = asked(client, "POST", f"/v1/engines/{quote(engine, safe='')}/drain")
    left = answer["conversations"]
    console.print(
        f"{escape(engine)} takes nothing new. "
        + (f"Conversations that move when their turns end: {left:,}." if left else "It is empty."),
        highlight=False,
    )


# --- the application ------------------------------------------------------------------------------


@contextlib.contextmanager
def application(url: str, key: str | None) -> Iterator[httpx.Client]:
    """Yield a client of an application; the command ends with what is wrong, if anything is."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        if is_loopback(httpx.URL(url).host):
            forget_proxies()
        client = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S)
    except (httpx.InvalidURL, ValueError, ImportError) as error:
        refuse(f"{url!r} is no URL, or the key is no key: {error}")
    with client:
        try:
            yield client
        except Unanswered as error:
            refuse(f"{error}.", 1)


def _request(client: httpx.Client, method: str, path: str) -> httpx.Response:
    try:
        # An application takes nothing by POST that does not say that it is JSON.
        answer = client.request(method, path, json={} if method == "POST" else None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unanswered(
            f"No ConServe application answers at {client.base_url} ({str(error).rstrip('.')})"
        ) from None
    if not answer.is_success:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{client.base_url} answers {answer.status_code}, and not as ConServe does"
        hint = " (it is taken from CONSERVE_API_KEY)" if answer.status_code == 401 else ""
        raise Unanswered(f"{message}{hint}", refused=answer.status_code < 500)
    return answer


def asked(client: httpx.Client, method: str, path: str) -> Json:
    answer = _request(client, method, path)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unanswered(f"{client.base_url} does not answer as ConServe does", refused=True)
    return found


def _look(client: httpx.Client) -> Seen:
    engines = asked(client, "GET", "/v1/engines")
    listed = asked(client, "GET", f"/v1/conversations?limit={_MOST_CONVERSATIONS}")
    text = _request(client, "GET", "/metrics").text
    return Seen(
        time.monotonic(), engines["data"], listed["data"], listed["total"], read_samples(text)
    )


def read_samples(text: str) -> Samples:
    """Return the metrics that are shown, of Prometheus' text, of all models together."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name.startswith(("conserve_ttf", "conserve_waiting", *_TOKENS)):
                found[one.name, one.labels.get("le") or one.labels.get("why") or ""] += one.value
    return found


# --- how it is shown ------------------------------------------------------------------------------

_TOKENS = ("conserve_prompt_tokens_total", "conserve_decoder_cached_tokens_total")
_WHY = {"room": "for room", "window": "for the admission window", "order": "behind others"}


def screen(recent: Sequence[Seen]) -> RenderableType:
    """Return the whole view, of what was seen lately; the newest comes last."""
    newest = recent[-1]
    table = Table()
    table.add_column("engine", no_wrap=True)
    table.add_column("occupancy, by conversation", overflow="fold")
    for column in ("to prefill", "decodes"):
        table.add_column(column, justify="right", no_wrap=True)
    held = _held(newest.conversations)
    for engine in newest.engines:
        table.add_row(*_engine_row(engine, held[engine["id"]]))
    # A terminal may have too few lines for all engines.
    totals = (Text(_conversations(newest)), _waiting(newest.samples), _times(recent))
    looks = (slow_turns(seen.conversations) for seen in reversed(recent))
    found = dict.fromkeys(one for look in looks for one in look)
    return Group(*totals, table, *_reasons("Slow turns, the newest first:", [*found][:_MOST_SLOW]))


def slow_turns(conversations: Sequence[Json]) -> list[tuple[str, str]]:
    """Return ids of conversations whose last turn was slow, each with the reason."""
    turns = ((one["id"], one["last_turn"] or {}) for one in conversations)
    return [(id_, turn["why"]) for id_, turn in turns if turn.get("why")]


def _reasons(title: str, found: Sequence[tuple[str, str]]) -> list[RenderableType]:
    shown = [Padding(Text(f"{id_}: {why}"), (0, 0, 0, 2), expand=False) for id_, why in found]
    return [Text(title, "bold"), *shown] if shown else []


def _conversations(seen: Seen) -> str:
    phases = [one["phase"] for one in seen.conversations]
    counts = (f"{phases.count(one)} {one}" for one in ("reasoning", "acting", "paused"))
    return f"{seen.total:,} conversations: {', '.join(counts)}"


def _held(conversations: Sequence[Json]) -> Mapping[str, dict[str, int]]:
    """Return the tokens that each engine has of its conversations, shared ones once."""
    held: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for conversation in conversations:
        for history in conversation["histories"]:
            if history["decoder"] is None:
                continue
            of_engine, id_ = held[history["decoder"]], conversation["id"]
            own = history["held_tokens"] - (history["shared_tokens"] if id_ in of_engine else 0)
            of_engine[id_] = of_engine.get(id_, 0) + own
    return held


def _engine_row(engine: Json, held: Mapping[str, int]) -> list[Text]:
    role = " ".join(filter(None, (engine.get("model"), engine["role"])))
    role += " (leaving)" if engine["leaving"] else ""
    load = engine["load"] or {"prefill_tokens": 0, "decodes": 0}
    prefilling = max(load["prefill_tokens"], engine["queued_tokens"] or 0)
    largest = sorted(held.items(), key=lambda one: -one[1])
    shown = ", ".join(f"{id_} {tokens:,}" for id_, tokens in largest[:_MOST_NAMES])
    more = max(engine["conversations"] or 0, len(largest)) - min(_MOST_NAMES, len(largest))
    names = f"{shown}, {more} more" if shown and more > 0 else shown
    occupancy = _bar(engine, [tokens for _, tokens in largest])
    return [
        Text.assemble(engine["id"], "\n", (role, "dim")),
        occupancy.append("" if engine["held_tokens"] is None else _of_capacity(engine, names)),
        Text(f"{prefilling:,}" if prefilling else ""),
        Text(str(load["decodes"] or "")),
    ]


def _of_capacity(engine: Json, names: str) -> str:
    held, capacity = engine["held_tokens"], engine["capacity_tokens"]
    return f"\n{held:,} of {capacity:,}" + (f": {names}" if names else "")


def _bar(engine: Json, tokens: Sequence[int]) -> Text:
    """Return an engine's room, with a segment for each conversation; neighbours differ."""
    capacity, held = engine["capacity_tokens"], engine["held_tokens"]
    if held is None or not capacity:
        return Text("")
    bar, used, chars = Text(), 0, 0
    whole = min(_BAR_CHARS, round(_BAR_CHARS * held / capacity))
    for number, one in enumerate(tokens):
        used += one
        until = min(whole, round(_BAR_CHARS * used / capacity))
        bar.append("█▒"[number % 2] * (until - chars), ("cyan", "blue")[number % 2])
        chars = max(chars, until)
    # Shared by conversations, or of those that are not listed.
    bar.append("░" * (whole - chars)).append("·" * (_BAR_CHARS - max(whole, chars)), "dim")
    return bar.append(f" {100 * held / capacity:.0f} %")


def _waiting(samples: Samples) -> Text:
    waiting = {why: int(samples.get(("conserve_waiting", why), 0)) for why in _WHY}
    said = [f"{count} {_WHY[why]}" for why, count in waiting.items() if count]
    return Text(f"Waiting: {', '.join(said) or 'none'}", "bold yellow" if said else "")


def _times(recent: Sequence[Seen]) -> Text:
    """Return times to first tokens and cache hits, of turns that ended since the oldest look."""
    since, newest = recent[0].samples, recent[-1].samples
    several = len(recent) > 1
    if not several:
        since = {}
    parts = []
    for name in ("ttft", "ttfet"):
        half, most = (quantile(since, newest, f"conserve_{name}_seconds", at) for at in (0.5, 0.95))
        found = "-" if half is None or most is None else f"{half:.2f} s (95 %: {most:.2f} s)"
        parts.append(f"median {name.upper()} {found}")
    prompts, cached = (newest.get((one, ""), 0.0) - since.get((one, ""), 0.0) for one in _TOKENS)
    parts.append(f"cache hits {100 * cached / prompts:.0f} %" if prompts else "cache hits -")
    period = f"Last {recent[-1].at_s - recent[0].at_s:.0f} s" if several else "Since its start"
    return Text(f"{period}: {', '.join(parts)}")


def quantile(since: Samples, newest: Samples, name: str, share: float) -> float | None:
    """Estimate a quantile of a histogram's growth, as Prometheus does; None without any."""
    grown = sorted(
        (float(le), count - since.get((metric, le), 0.0))
        for (metric, le), count in newest.items()
        if metric == f"{name}_bucket"
    )
    if not grown or not grown[-1][1]:
        return None
    wanted = share * grown[-1][1]
    below, before = 0.0, 0.0
    for bound, count in grown:
        if count >= wanted:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (wanted - before) / (count - before)
        below, before = bound, count
    return below


def conversations_table(conversations: Sequence[Json]) -> RenderableType:
    tenants = any("tenant" in one for one in conversations)
    table = Table()
    table.add_column("conversation", no_wrap=True)
    if tenants:
        table.add_column("tenant", no_wrap=True)
    for column in ("phase", "engine"):
        table.add_column(column, no_wrap=True)
    for column in ("turns", "tokens", "idle", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for depth, one in _by_family(conversations):
        name = "  " * (depth - 1) + "└ " * bool(depth) + one["id"]
        cells = [name, *([one.get("tenant", "")] if tenants else []), one["phase"]]
        cells += [one["decoder"] or "-", f"{one['turns']:,}", f"{one['held_tokens']:,}"]
        cells += [_time(one["idle_s"]), _time(one["age_s"])]
        table.add_row(*map(Text, cells))
    return Group(table, *_reasons("Slow last turns:", slow_turns(conversations)))


def cache_tables(answer: Json) -> RenderableType:
    """Return computed tokens by cause, what to do about each, and tokens by client and tenant."""
    causes, table = answer["causes"], Table("cause")
    metered = any(one.get("joules") for one in causes)
    for column in ("tokens", "share", "seconds", *["joules"] * metered, "turns"):
        table.add_column(column, justify="right")
    table.add_column("example", overflow="fold")
    for one in causes:
        example = ", ".join(one[name] for name in ("tenant", "example", "where") if name in one)
        cells = [one["name"], f"{one['tokens']:,}", f"{one['share']:.1%}", f"{one['seconds']:.1f}"]
        if metered:
            cells.append("" if one["joules"] is None else f"{one['joules']:,.0f}")
        table.add_row(*cells, f"{one['turns']:,}", Text(example))
    lines = _reasons("What to do:", [(one["name"], one["advice"]) for one in causes])
    names = {one["cause"]: one["name"] for one in causes}
    for of in ("client", "tenant"):
        found = [
            (name, ", ".join(f"{names[cause]} {tokens:,}" for cause, tokens in sums.items()))
            for name, sums in answer[f"{of}s"].items()
        ]
        lines += _reasons(f"Tokens by {of}:", found)
    total, again = f"{answer['tokens']:,}", f"{answer['again_tokens']:,}"
    said = f"{total} prompt tokens computed, {again} of them again"
    return Group(Text(f"{answer['model']}, last {answer['minutes']} min: {said}"), table, *lines)


def _by_family(conversations: Sequence[Json]) -> Iterator[tuple[int, Json]]:
    """Yield conversations, each before those that it began, and how deep each is."""
    listed = {(one.get("tenant"), one["id"]): one for one in conversations}

    def below(one: Json, depth: int) -> Iterator[tuple[int, Json]]:
        if listed.pop((one.get("tenant"), one["id"]), None) is not None:
            yield depth, one
            for child in one["children"]:
                if (found := listed.get((one.get("tenant"), child))) is not None:
                    yield from below(found, depth + 1)

    roots = [one for one in conversations if (one.get("tenant"), one["parent"]) not in listed]
    # Those that are left began each other in a circle.
    for one in (*roots, *conversations):
        yield from below(one, 0)


def _time(time_s: float) -> str:
    if time_s < 60:
        return f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 3600 else f"{time_s / 3600:.1f} h"
