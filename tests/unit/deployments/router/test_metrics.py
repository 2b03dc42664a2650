"""What a router answers to Prometheus."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from conserve.settings import Settings
from deployments.answers import Engine
from deployments.router.frontdoor import FrontDoor
from deployments.table_client import TableUnavailable
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.stub_table import StubTable, listed_engine

ENGINES = [
    listed_engine("d1", url="http://127.0.0.1:41001", cache_metrics="127.0.0.1:7611"),
    listed_engine("p1", "prefiller", url="http://127.0.0.1:41002", cache_metrics="127.0.0.1:7611"),
    listed_engine("d2", url="http://10.0.0.7:41003", cache_metrics="127.0.0.1:7611"),
]


class Table(StubTable):
    """Has these engines, and answers `/metrics` after some seconds or not at all."""

    def __init__(self, answers_in_s: float | None = 0.0, engines: list[Engine] = ENGINES) -> None:
        self.answers_in_s = answers_in_s
        self.engines_there = engines

    async def call(self, method: str, *given: Any) -> Any:
        if method == "engines":
            return self.engines_there
        assert method == "metrics"
        if self.answers_in_s is None:
            raise TableUnavailable("the conversation table is down")
        await asyncio.sleep(self.answers_in_s)
        return b"conserve_table_up 1.0\n"


def get(
    path: str, table: Table, peer: str = "127.0.0.1", headers: dict[str, str] | None = None
) -> httpx.Response:
    door = FrontDoor(Settings(unauthenticated=True, host="0.0.0.0"), table, "router")
    return ask(door, "GET", path, "router", peer, headers=headers)


def listed(peer: str) -> list[tuple[list[str], dict[str, str]]]:
    answer = get("/metrics/targets", Table(), peer)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return [(one["targets"], one["labels"]) for one in json.loads(answer.content)]


def test_engines_and_each_lmcache_server_are_listed_once() -> None:
    assert listed("127.0.0.1") == [
        (["127.0.0.1:41001"], {"part": "engine", "role": "decoder", "replica": "d1"}),
        (["127.0.0.1:41002"], {"part": "engine", "role": "prefiller", "replica": "p1"}),
        (["10.0.0.7:41003"], {"part": "engine", "role": "decoder", "replica": "d2"}),
        (["127.0.0.1:7611"], {"part": "lmcache"}),
    ]


def test_another_machine_is_not_told_of_what_it_cannot_reach() -> None:
    assert [targets for targets, _ in listed("10.0.0.9")] == [["10.0.0.7:41003"]]


def test_without_engines_the_list_is_empty() -> None:
    assert get("/metrics/targets", Table(engines=[])).json() == []


@pytest.mark.parametrize("answers_in_s", [None, 60.0])
def test_a_scrape_is_answered_in_time_without_the_table(answers_in_s: float | None) -> None:
    """Prometheus would drop what comes later, and know nothing of the router."""
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": "0.1"}
    answer = get("/metrics", Table(answers_in_s), headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    described, kind, value = answer.text.splitlines()
    assert described.startswith("# HELP conserve_table_up 1: the conversation table answered")
    assert (kind, value) == ("# TYPE conserve_table_up gauge", "conserve_table_up 0.0")


@pytest.mark.parametrize("said", ["", "soon", "-1", "inf", "nan", "0", "10"])
def test_a_table_that_answers_is_heard_whatever_the_header_says(said: str) -> None:
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": said}
    assert get("/metrics", Table(0.05), headers=headers).text == "conserve_table_up 1.0\n"


def test_other_clients_get_503_without_the_table() -> None:
    answer = get("/metrics", Table(None))
    assert answer.status_code == 503
    assert "table" in answer.json()["error"]["message"]
