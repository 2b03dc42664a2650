"""Sending a case for a bounded time, and judging what comes back."""

import json
import logging
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import requests
from schemathesis import Case, Response
from schemathesis.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from schemathesis.core.failures import FailureGroup

from conserve.apis import form_of, is_anthropic
from tests.acceptance.fuzz.cases import TURNS, raw_body

logger = logging.getLogger(__name__)

# How long a client waits for the whole of an answer, s. Most get theirs; whoever asks for a million
# tokens leaves before they are there, which is part of the test.
_PATIENCE_S = (0.02, 0.3, 1.0, 3.0, 3.0, 3.0)
# What is no turn has to be answered, s.
_ANSWERED_S = 60.0
# What uvicorn says of bytes that are no request in HTTP (a control character in a header, say).
_NO_HTTP = b"Invalid HTTP request received."
_CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


class Wrong(Exception):
    """An answer that may not be; the message says in what, alike for all that are alike."""


@dataclass
class Finding:
    """Something wrong, and the smallest request that shows it."""

    what: str
    times: int
    shown_by: str


@dataclass
class Report:
    """What has been found so far.

    Attributes:
        outcomes: how often each status came; `left` where the client did not wait, `unsendable`
            where there is no such request in HTTP.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def found(self, what: str, case: Case, data: bytes | None) -> None:
        shown_by = f"{case.as_curl_command()}{'' if data is None else f'  with {data[:300]!r}'}"
        with self._lock:
            # Alike but for a value, they are the same.
            what = re.sub(r"'[^']*'|\d+", "…", what[:300])
            if what not in self.findings:
                logger.warning("%s\n%s", what, shown_by[:3000])
            finding = self.findings.setdefault(what, Finding(what, 0, shown_by))
            finding.times += 1
            if len(shown_by) < len(finding.shown_by):
                finding.shown_by = shown_by

    def __str__(self) -> str:
        lines = [f"{sum(self.outcomes.values())} cases: {dict(sorted(self.outcomes.items()))}"]
        for finding in self.findings.values():
            lines += [f"--- {finding.times} times: {finding.what}", finding.shown_by[:3000]]
        return "\n".join(lines)


Judge = Callable[[Case, Response], None]


def try_all(
    url: str,
    cases: Iterator[Case],
    seed: int,
    clients: int = 8,
    patience_s: Sequence[float] = _PATIENCE_S,
    also: Judge = lambda case, response: None,
) -> Report:
    """Send every case, several at a time.

    Args:
        patience_s: one of these is how long a client waits for a turn.
        also: raises `Wrong` for an answer that may not be, besides what `judge` finds.
    """
    report = Report()
    rng = random.Random(seed)
    waiting: Queue[tuple[Case, float] | None] = Queue(clients)

    def work() -> None:
        with requests.Session() as session:
            while (given := waiting.get()) is not None:
                _try_one(url, session, *given, report, also)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for number, case in enumerate(cases):
        waiting.put((case, rng.choice(patience_s)))
        if number % 500 == 499:
            logger.info("%d cases, %d findings", number + 1, len(report.findings))
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    return report


def _try_one(
    url: str, session: requests.Session, case: Case, patience_s: float, report: Report, also: Judge
) -> None:
    data = raw_body(case)
    sent = {} if data is None else {"data": data}
    patience_s = patience_s if case.operation.label in TURNS else _ANSWERED_S
    try:
        response = case.call(base_url=url, session=session, timeout=patience_s, **sent)
    except requests.exceptions.Timeout:
        report.add("left")
        return
    except (requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL, UnicodeError):
        report.add("unsendable")
        return
    except Exception as error:
        report.add("broken")
        report.found(f"{case.operation.label}: {type(error).__name__}: {error}"[:300], case, data)
        return
    report.add(str(response.status_code))
    try:
        judge(case, response)
        also(case, response)
    except FailureGroup as failures:
        for failure in failures.exceptions:
            what = f"{case.operation.label}: {response.status_code} {failure}"[:400]
            report.found(what, case, data)
    except Wrong as wrong:
        report.found(f"{case.operation.label}: {wrong}", case, data)


def judge(case: Case, response: Response) -> None:
    """Hold an answer to what is declared, and to what holds of all answers.

    Raises:
        FailureGroup: it is not as the document says.
        Wrong: it is a failure of the server's, or no proper error or stream.
    """
    status, text = response.status_code, response.text
    if status >= 500 and not (status == 503 and "retry-after" in response.headers):
        raise Wrong(f"{status}: {text[:200]}")
    if status == 400 and response.content == _NO_HTTP:
        return
    if status >= 400:
        _require_error(case, response)
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        _require_stream(case, response)
    # These are told before anybody looks what is asked for.
    early = status in (401, 403, 415, 421)
    case.validate_response(response, checks=_CHECKS, excluded_checks=[unsupported_method] * early)


def _require_error(case: Case, response: Response) -> None:
    anthropic = is_anthropic(case.operation.path)
    needed = {"type"} if anthropic else {"type", "param", "code"}
    try:
        told = json.loads(response.content)
        error = told["error"]
        shaped = isinstance(error["message"], str) and needed <= set(error)
        shaped = shaped and (told.get("type") == "error") == anthropic
    except (ValueError, KeyError, TypeError):
        shaped = False
    if not shaped:
        raise Wrong(
            f"{response.status_code}, not an error as its API has it: {response.text[:200]}"
        )


def _code(error: dict[str, Any]) -> int:
    return error["code"] if isinstance(error.get("code"), int) else 0


def _require_stream(case: Case, response: Response) -> None:
    """Events that are JSON, ended as the path has it unless the client has left; no failure."""
    ends = form_of(case.operation.path).ends
    said = re.sub(r"(?m)^: keep-alive\n\n", "", response.content.decode())
    events = [part for part in said.split("\n\n") if part]
    for event in events:
        if event == "data: [DONE]":
            continue
        try:
            parsed = json.loads(event.partition("data: ")[2])
        except ValueError:
            raise Wrong(f"an event that is no JSON: {event[:100]}") from None
        error = parsed.get("error")
        # vLLM tells there what it finds wrong with a request only when it begins to work on it.
        if parsed.get("type") == "error" or (error and not 400 <= _code(error) < 500):
            raise Wrong(f"an error within a stream: {event[:200]}")
    ended = bool(events) and events[-1].encode().startswith(ends)
    if not response.stream_cut_short and not ended:
        raise Wrong(f"a stream that was not ended: {events[-1:]}"[:200])
