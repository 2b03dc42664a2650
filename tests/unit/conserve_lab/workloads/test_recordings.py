"""Recordings of `conserve record` are written within bounds, and read as they were played."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from conserve.recording import block_digests
from conserve_cli.main import cli
from conserve_lab.workloads import Arrivals, WorkloadError, recorded
from conserve_lab.workloads.recorded import recorded_sessions
from conserve_lab.workloads.recordings import RecordingFile

SALT = b"a table's"
SYSTEM = list(range(200))


def turn(at: float, prompt: list[int], name: str = "a", **more: Any) -> dict[str, Any]:
    """Return a turn as `GET /v1/recording` has it."""
    blocks = base64.b64encode(block_digests(SALT, prompt, ())).decode()
    for field in {"parent"} & more.keys():
        more[field] = base64.b64encode(more[field].encode().ljust(8)).decode()
    return {
        "at": at, "conversation": base64.b64encode(name.encode().ljust(8)).decode(),
        "history": None, "parent": None, "tenant": None, "background": False, "cause": "first",
        "outcome": "completed", "prompt_tokens": len(prompt), "output_tokens": 10,
        "decoder_cached_tokens": 0, "lmcache_tokens": 0, "remote_tokens": 0, "ttft_s": 0.25,
        "ttfet_s": None, "latency_s": 1.0, "idle_s": None, "tool": "", "blocks": blocks, **more,
    }  # fmt: skip


def page(*turns: dict[str, Any], dropped: int = 0) -> dict[str, Any]:
    engines = [["decoder", True, 1000, 2000]]
    deployed = {"placement": "elastic", "parks": True, "profile": None, "engines": engines}
    about = {"model": "m", "block_tokens": 64, "newest": 1, "deployment": deployed}
    return about | {"dropped": dropped, "turns": list(turns)}


def prompt(tokens: int, owner: int) -> list[int]:
    return SYSTEM + [1000 * owner + place for place in range(tokens - len(SYSTEM))]


FAMILY = (
    turn(100.0, prompt(300, 1), tool="open"),
    turn(101.5, prompt(260, 3), name="child", parent="a"),
    turn(104.0, prompt(500, 1)),
    turn(105.0, prompt(400, 2), name="b"),
    turn(106.0, [9] * 300, history=1),
)


def written(path: Path, *turns: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    file = RecordingFile(path, options.pop("most_bytes", 10**6), **options)
    for one in turns:
        file.write(page(one))
    file.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_recorded_is_played_again(tmp_path: Path) -> None:
    path = tmp_path / "of.today"
    head, *lines = written(path, *FAMILY)
    assert head["conserve_recording"] == 1
    assert [one["shared"] for one in lines] == [0, 0, 4, 0, 0]
    assert path.stat().st_mode & 0o77 == 0
    sessions = [read() for read in recorded_sessions(path).values()]
    first, second = sessions
    assert [one.at_s for one in sessions] == [0.0, 5.0]
    assert [(one.prompt_tokens, one.kept_blocks, one.tool) for one in first.calls] == [
        (300, 0, "open"), (500, 4, ""),
    ]  # fmt: skip
    assert [(one.started_s, one.took_s) for one in first.calls] == [(0.0, 1.0), (4.0, 1.0)]
    child, title = first.sub_agents
    # The parent went on after the child had answered, and did not wait for the other history.
    assert (child.after, child.started_s, child.ended_s) == (0, 1.5, 2.5)
    assert (title.after, title.ended_s) == (1, None)
    # All but one begin with the same 200 tokens, three whole blocks of which are known.
    assert [one.begins[-1].tokens for one in (first, second, child.session)] == [192] * 3
    assert title.session.begins == ()
    arrivals, tokens = Arrivals("recorded"), range(5000)
    played = recorded(path, sessions=9, arrivals=arrivals, vocabulary=tokens)
    came = [at_s for at_s, _ in played]
    assert came == [0.0, 1.5, 5.0, 6.0]
    turns = [script.next(None) for _, script in played]
    prompts = [one.body()["prompt"] for one in turns if one is not None]
    assert prompts[0][:192] == prompts[1][:192] == prompts[2][:192] != prompts[3][:192]
    assert prompts[0][:256] != prompts[2][:256]


def test_other_traces_do_not_say_when_sessions_came(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    arrivals = Arrivals("recorded")
    with pytest.raises(WorkloadError, match="only a file of `conserve record` says when"):
        list(recorded(path, sessions=1, arrivals=arrivals, vocabulary=range(99)))


def test_files_have_other_digests_and_no_names_of_tools(tmp_path: Path) -> None:
    lines = [written(tmp_path / name, *FAMILY, anonymous_tools=True)[1:] for name in "ab"]
    assert lines[0][0]["tool"] == "tool-1"
    for field in ("conversation", "blocks"):
        found = [{one[field] for one in each} for each in lines]
        assert not found[0] & found[1]


def test_a_full_file_is_renamed_and_each_can_be_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "r"
    turns = [turn(100.0 + at, prompt(300 + 64 * at, 1)) for at in range(40)]
    lines = written(path, *turns, most_bytes=8000)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["r", "r.1"]
    assert all(one.stat().st_size < 4600 for one in tmp_path.iterdir())
    assert "conserve_recording" in lines[0]
    assert lines[1]["shared"] == 0
    assert lines[-1]["at"] == 139.0
    for one in (path, tmp_path / "r.1"):
        (read,) = recorded_sessions(one).values()
        calls = read().calls
        assert [call.kept_blocks for call in calls[1:]] == [
            call.prompt_tokens // 64 for call in calls[:-1]
        ]


BROKEN = {
    '{"conserve_recording":2': "expected 1, found 2; read it with a newer ConServe",
    '"shared":4': "shared: expected at most 4, as its history's turn above has, found 5",
    '"blocks":"': "blocks: expected digests of 16 hexadecimal digits",
}


@pytest.mark.parametrize("old", BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, old: str) -> None:
    path = tmp_path / "r.jsonl"
    written(path, *FAMILY)
    changed = {'{"conserve_recording":2': '{"conserve_recording":1', '"blocks":"': '"blocks":"'}
    new = {'"shared":4': '"shared":5', '"blocks":"': '"blocks":"xy'}.get(old, old)
    path.write_text(path.read_text().replace(changed.get(old, old), new, 1))
    with pytest.raises(WorkloadError, match=r"r\.jsonl, line \d: ") as error:
        recorded_sessions(path)
    assert BROKEN[old] in str(error.value)


class _Router(BaseHTTPRequestHandler):
    pages: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if self.pages else 401)
        self.end_headers()
        answer = self.pages.pop(0) if self.pages else {"error": {"message": "no such key"}}
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Router)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _Router.asked.clear()
    _Router.pages[:] = [page(), page(FAMILY[0], dropped=3)]
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_recorder_asks_until_it_is_refused(url: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    done = CliRunner().invoke(cli, ["record", str(path), url, "--tenant", "a b"])
    assert (done.exit_code, "no such key" in done.output) == (1, True)
    assert _Router.asked[:2] == ["/v1/recording?after=0&tenant=a%20b",
                                 "/v1/recording?after=1&tenant=a%20b"]  # fmt: skip
    _, dropped, line = map(json.loads, path.read_text().splitlines())
    assert (dropped, line["at"]) == ({"dropped": 3}, 100.0)
    again = CliRunner().invoke(cli, ["record", str(path), url])
    assert (again.exit_code, "exists; name a file that does not" in again.output) == (2, True)


def test_a_full_disk_ends_the_recorder_with_a_word(url: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["record", "/dev/full", url])
    assert done.exit_code == 1
    assert "/dev/full cannot be written: No space left on device." in done.output
