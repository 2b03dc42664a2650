"""What clients report of their tools, and what is refused."""

from typing import Any

import pytest

from conserve.pausing import ToolReport
from deployments.messages import Refusal
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.router.fakes import a_door
from tests.unit.deployments.stub_table import StubTable


def a_table() -> StubTable:
    """Knows conversation `a/b`, with a tool that runs, and `full`."""
    answers = {"a/b": 1, "full": Refusal(400, "too many", "too_many_tools")}
    return StubTable(report_tool=lambda id_, report: answers.get(id_))


def post(table: StubTable, body: Any, name: str = "a/b") -> tuple[int, Any]:
    answer = ask(a_door(table), "POST", f"/v1/conversations/{name}/tools", json=body)
    return answer.status_code, answer.json()


def test_a_report_gets_to_the_table() -> None:
    table = a_table()
    assert post(table, {"event": "start", "tool": "bash"}) == (200, {"running_tools": 1})
    assert post(table, {"event": "end", "tool": "b" * 64, "call_id": "call 1"})[0] == 200
    assert table.asked == [
        ("report_tool", "a/b", ToolReport("bash")),
        ("report_tool", "a/b", ToolReport("b" * 64, "call 1", ended=True)),
    ]


def test_it_is_said_what_is_not_there_or_too_many() -> None:
    report = {"event": "start", "tool": "bash"}
    assert post(a_table(), report, "unknown")[0] == 404
    status, body = post(a_table(), report, "full")
    assert (status, body["error"]["code"]) == (400, "too_many_tools")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"event": "begin"}, "event"),
        ({"event": None}, "event"),
        ({"event": ["start"]}, "event"),
        ({"tool": ""}, "tool"),
        ({"tool": "b" * 65}, "tool"),
        ({"tool": "a\tb"}, "tool"),
        ({"tool": "ä"}, "tool"),
        ({"tool": 7}, "tool"),
        ({"call_id": ""}, "call_id"),
        ({"call_id": "c" * 129}, "call_id"),
        ({"call_id": 7}, "call_id"),
    ],
)
def test_what_is_no_report_is_refused(change: dict[str, Any], param: str) -> None:
    table = a_table()
    status, body = post(table, {"event": "start", "tool": "bash"} | change)
    assert (status, body["error"]["param"]) == (400, param)
    assert table.asked == []
