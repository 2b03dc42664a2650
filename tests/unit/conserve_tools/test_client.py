"""An agent against a small server: its requests, and the failures that it survives."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from conserve_tools.client import Agent, EnvironmentRefused
from conserve_tools.client import environment as environments

RESULT = {
    "exit_code": 0, "stdout": "a\nb\n", "stderr": "", "truncated": False, "timed_out": False,
    "reason": None, "wall_s": 0.1, "isolation": "limits",
}  # fmt: skip

END = "/v1/conversations/named"
BUSY = (503, {"error": {"message": "the table is being restarted", "code": "unavailable"}})
OVER = (404, {"error": {"message": "no live conversation", "code": "conversation_not_found"}})
OFF = (
    404,
    {"error": {"message": "set environments.enabled=true", "code": "environments_disabled"}},
)
CUT = (503, {"error": {"message": "it may have run in part", "code": "command_cut"}})
LISTED = (200, {"object": "list", "data": [{"id": "main"}]})


class Handler(BaseHTTPRequestHandler):
    """Gives a server's prepared answers."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def handle_one(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(raw) if raw else None
        self.server.asked.append((self.command, self.path, body, headers))
        asked = (self.command, self.path.rsplit("/", 1)[1])
        prepared = self.server.answers.get(asked, [(200, {})])
        status, said = prepared.pop(0) if len(prepared) > 1 else prepared[0]
        if status == 0:
            self.close_connection = True
            return
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = handle_one

    def log_message(self, format: str, *arguments: Any) -> None: ...


class Server(ThreadingHTTPServer):
    """Keeps its requests, and its answers by method and the path's last part.

    Each answer is given once but for the last. Status 0 breaks the connection.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[tuple[str, str, Any, dict[str, str]]] = []
        self.answers: dict[tuple[str, str], list[tuple[int, Any]]] = {
            ("POST", "environments"): [(200, {"id": "main"})],
            ("GET", "environments"): [LISTED],
            ("POST", "run"): [(200, RESULT)],
            ("GET", "models"): [(200, {"object": "list", "data": [card("m")]})],
        }

    def paths(self, method: str) -> list[str]:
        return [path for asked, path, *_ in self.asked if asked == method]

    def bodies(self, last: str) -> list[Any]:
        return [body for _, path, body, _ in self.asked if path.endswith(f"/{last}") and body]


def card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "x"}


def completion(**message: Any) -> tuple[int, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    said = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    return 200, {**said, "choices": [choice]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(environments, "_FIRST_PAUSE_S", 0.001)
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_an_agent_from_beginning_to_end(server: Server) -> None:
    call = {"name": "bash", "arguments": '{"command": "ls"}'}
    asks = {"tool_calls": [{"id": "c1", "type": "function", "function": call}], "content": None}
    server.answers["POST", "completions"] = [completion(**asks), completion(content="two files")]
    with Agent(server.url, "fix/42", key="the-key") as agent:
        env = agent.environment(ports=1)

        @agent.tool
        def bash(command: str) -> str:
            """Run a shell command."""
            return env.run(command).stdout

        assert agent.run("which files?", temperature=0) == "two files"
    assert all(headers["authorization"] == "Bearer the-key" for *_, headers in server.asked)
    first, second = server.bodies("completions")
    assert first["model"] == "m"
    assert first["tools"][0]["function"]["name"] == "bash"
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "a\nb\n"}
    assert [(one["event"], one["tool"], one["call_id"]) for one in server.bodies("tools")] == [
        ("start", "bash", "c1"),
        ("end", "bash", "c1"),
    ]
    assert server.paths("DELETE") == [
        "/v1/conversations/fix%2F42/environments/main",
        "/v1/conversations/fix%2F42",
    ]
    turns = [headers for _, path, _, headers in server.asked if path.endswith("completions")]
    assert [headers["x-conversation-id"] for headers in turns] == ["fix/42"] * 2


def test_it_is_released_when_something_is_raised(server: Server) -> None:
    with pytest.raises(ZeroDivisionError), Agent(server.url) as agent:
        raise ZeroDivisionError
    assert server.paths("DELETE")[-1] == f"/v1/conversations/{agent.conversation}"
    with pytest.raises(RuntimeError, match="closed"):
        agent._http.get("/")


def test_a_server_without_reports(server: Server) -> None:
    """The agent asks it once and goes on; a 404 for an unknown conversation is something else."""
    missing = {"error": {"message": "no such path", "code": None}}
    server.answers["POST", "tools"] = [OVER, (404, missing)]
    with Agent(server.url) as agent:
        agent.tool(abs_of)
        for _ in range(4):
            assert agent.call("abs_of", '{"number": -3}') == "3"
    assert len(server.bodies("tools")) == 2


def abs_of(number: int) -> int:
    return abs(number)


@pytest.mark.parametrize(
    ("asked", "answers", "removed"),
    [
        # An end that is cut is told again.
        (("DELETE", "named"), [BUSY, (0, None), OVER], [f"{END}/environments/main", *[END] * 3]),
        # So is the question which environments there are: otherwise they would stay.
        (("GET", "environments"), [(0, None), LISTED], [f"{END}/environments/main", END]),
        # A server without environments ends the conversation.
        (("GET", "environments"), [OFF], [END]),
    ],
)
def test_what_a_conversation_had_is_removed(
    server: Server, asked: tuple[str, str], answers: list[tuple[int, Any]], removed: list[str]
) -> None:
    server.answers[asked] = [*answers]
    with Agent(server.url, "named"):
        pass
    assert server.paths("DELETE") == removed


def test_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(environments, "_LONGEST_PAUSE_S", 0.001)
    with Agent("http://127.0.0.1:9") as agent:
        agent.tool(abs_of)
        assert agent.call("abs_of", '{"number": -3}') == "3"


def test_a_broken_connection_does_not_run_it_twice(server: Server) -> None:
    server.answers["POST", "run"] = [(0, None), BUSY, (200, RESULT)]
    with Agent(server.url) as agent:
        assert agent.environment().run("ls").output == "a\nb"
    ids = [body["call_id"] for body in server.bodies("run")]
    assert len(ids) == 3
    assert len(set(ids)) == 1


def test_a_refusal_is_not_asked_again(server: Server) -> None:
    """A command that may have run in part is the caller's to repeat."""
    server.answers["POST", "run"] = [CUT]
    with Agent(server.url) as agent:
        env = agent.environment()
        with pytest.raises(EnvironmentRefused, match="in part") as error:
            env.run("make")
        assert error.value.code == "command_cut"
        server.answers["POST", "environments"] = [OFF]
        with pytest.raises(EnvironmentRefused, match="enabled=true"):
            agent.environment()
    assert len(server.bodies("run")) == 1


def test_what_a_model_does_wrong_is_told(server: Server) -> None:
    def fails(path: str) -> None:
        raise OSError("no such file")

    with Agent(server.url) as agent:
        agent.tool(fails)
        assert agent.call("none", "{}") == "error: there is no tool 'none'; there are fails"
        assert agent.call("fails", '{"path": "x"}') == "error: OSError: no such file"
        assert agent.call("fails", "{}") == "error: path: Field required"
        assert agent.call("fails", '{"path": "x", "more": 1}').startswith("error: more:")
        assert agent.call("fails", "no json").startswith("error: Invalid JSON")
