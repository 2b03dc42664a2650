"""Whatever a client sends, it is answered as the document says, and takes nothing down."""

import itertools
import logging
import random
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis
import psutil
import pytest
from hypothesis.internal import lambda_sources
from schemathesis import Case, Response

from tests.acceptance.fuzz.cases import CHAT, ahead, coverage, described, fuzzing, short_turns
from tests.acceptance.fuzz.trial import judge, try_all
from tests.engines.applications import MAIN
from tests.engines.client import engines, release_all
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.full, pytest.mark.application(MAIN, last=True)]

# Of all cases, this part is what schemathesis tries of every field; the others are drawn.
_COVERAGE = 0.25


@pytest.fixture(autouse=True)
def _other_threads_may_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are drawn while others are sent: what Hypothesis walks through has to stand still.

    It goes through `sys.modules` itself where it describes a lambda, which fails as soon as one of
    the clients' threads imports anything.
    """
    still = SimpleNamespace(**{**vars(sys), "modules": sys.modules.copy()})
    monkeypatch.setattr(lambda_sources, "sys", still)


@pytest.mark.timeout(4 * 3600)
async def test_no_request_takes_anything_down(
    application: str,
    client: httpx.AsyncClient,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "httpx")
    count = request.config.getoption("--fuzz-cases")
    seed = request.config.getoption("--fuzz-seed")
    logger.info("%d cases, --fuzz-seed %d", count, seed)
    document = (await client.get(application + "/openapi.json")).json()
    del document["paths"]["/v1/events"]  # It has no end.
    before = {engine["id"]: engine["pid"] for engine in engines()}
    lost = metric("conserve_engines_lost_total")

    covering = list(coverage(document))
    random.Random(seed).shuffle(covering)
    covering = covering[: int(count * _COVERAGE)]
    drawn = fuzzing(document, count - len(covering), seed)
    report = try_all(application, ahead(itertools.chain(covering, drawn)), seed)
    logger.info("%s", report)

    assert not report.findings, str(report)
    assert metric("conserve_engines_lost_total") == lost
    assert {engine["id"]: engine["pid"] for engine in engines()} == before
    assert all(psutil.pid_exists(pid) for pid in before.values())
    release_all()
    await eventually("nothing is in line or counted", _at_rest)
    # Of all these statuses, a run that means anything has had some.
    assert {"200", "400", "404", "left"} <= set(report.outcomes), report.outcomes


def test_conversations_in_any_order(
    application: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns, looks at what they have left, and ends of it, one leading to the next."""
    caplog.set_level(logging.WARNING, "httpx")
    count = request.config.getoption("--fuzz-cases")
    document = httpx.get(application + "/openapi.json", timeout=60).json()
    seen: set[tuple[str, int]] = set()
    base = described(short_turns(document)).as_state_machine()

    class Client(base):  # type: ignore[valid-type, misc]
        def setup(self) -> None:
            release_all()

        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            return {"base_url": application, "timeout": 60}

        def validate_response(self, response: Response, case: Case, **_: Any) -> None:
            seen.add((case.operation.label, response.status_code))
            judge(case, response)

    machine = hypothesis.seed(request.config.getoption("--fuzz-seed"))(Client)
    machine.run(
        settings=hypothesis.settings(
            max_examples=max(20, count // 50),
            stateful_step_count=6,
            phases=[hypothesis.Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
    )
    for operation in (CHAT, "GET /v1/conversations/{id}", "DELETE /v1/conversations/{id}"):
        assert (operation, 200) in seen, seen


def _at_rest() -> bool:
    release_all()
    counts = ("queue_length", "decoder_held_tokens", "conversations")
    return not any(metric(f"conserve_{one}") for one in counts)
