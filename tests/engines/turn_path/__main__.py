"""Prints what one first turn takes: files that run, calls of the conversation table, and structs.

`python -m tests.engines.turn_path` starts a prefiller and a decoder on CPUs, and warms them up with
a conversation. Then each process of the application records the files whose functions are called
(`recorder.py`), during one streamed chat turn of about 1,000 tokens and the second after it, and
once more in as much time without a turn, since beats and reports run then too. The two may have
files in common, so none is subtracted. The table's calls are those that its process gets from the
request to its client's first token; a method that others call without a turn too is marked.
"""

import ast
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich import print as show
from rich import print_json
from rich.table import Table

from conserve.launch import Launch
from conserve.settings import EMBEDDED_MODEL
from tests.at_start import FOLDER
from tests.engines.applications import START_S, URL
from tests.engines.client import prose
from tests.engines.turn_path.recorder import ROOT, SIGN, VARIABLE

_ARGUMENTS = ["decoders=1", "placement=conversation", "engine.dtype=float32", "lmcache.size_gb=0.5"]
# Part of a process's title, by its kind.
_KINDS = {
    "router": ":Router", "table": "TableActor", "prefiller's server": ":prefiller",
    "decoder's server": ":decoder", "engine cores": "VLLM", "distinct": "",
}  # fmt: skip
# Structs that hold what is known of one turn, by their module.
_STRUCTS = {
    "deployments/router/request": "ClientRequest",
    "deployments/messages": "BeginTurn TurnPlan",
    "conserve/wire": "DecoderTurn",
    "deployments/engine/turn": "EngineTurn",
    "conserve/turn": "TurnStats",
    "deployments/answers": "Turn",
}


def _turn(text: str) -> tuple[float, float, float]:
    """Send a chat's first turn; returns its beginning, first token, and a second after its end."""
    messages = [{"role": "user", "content": text}]
    body = {"model": "conserve-embedded", "messages": messages, "max_tokens": 24, "stream": True}
    asked_s, first_s = time.time(), 0.0
    with httpx.stream("POST", URL + "/v1/chat/completions", json=body, timeout=START_S) as answer:
        for line in answer.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                first_s = first_s or time.time()
    assert first_s, f"no answer: status {answer.status_code}"
    time.sleep(1.0)
    return asked_s, first_s, time.time()


def _recorded(folder: Path, name: str, during: Callable[[], Any]) -> tuple[list[Any], Any]:
    """Return what each process records meanwhile, and what ``during`` returns."""
    (folder / SIGN).write_text(name)
    time.sleep(3.0)
    result = during()
    (folder / SIGN).unlink()
    began = list(folder.glob(f"{name}-*.began"))
    while not all(one.with_suffix(".json").exists() for one in began):
        time.sleep(0.1)
    return [json.loads(one.with_suffix(".json").read_text()) for one in began], result


def _measured() -> dict[str, Any]:
    rng, log = random.Random(0), Path(tempfile.gettempdir(), "turn-path.log")
    arguments = [f"model={EMBEDDED_MODEL}", *_ARGUMENTS]
    with tempfile.TemporaryDirectory() as name:
        environment = {VARIABLE: name, "PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
        with Launch(arguments, log, environment) as launch:
            launch.wait_until_serving(URL, 1, 1, timeout_s=START_S)
            _turn(prose(rng, 1000))
            time.sleep(3.0)
            seen, times_s = _recorded(Path(name), "turn", lambda: _turn(prose(rng, 1000)))
            took_s = times_s[2] - times_s[0]
            alone, _ = _recorded(Path(name), "alone", lambda: time.sleep(took_s))
    files = {kind: _files(seen, part) for kind, part in _KINDS.items()}
    calls = [call for one in seen for call in one["calls"] if times_s[0] <= call[0] <= times_s[1]]
    return {
        "files": files,
        "lines": {
            kind: sum(len((ROOT / one).read_text().splitlines()) for one in names)
            for kind, names in files.items()
        },
        "alone": {kind: len(_files(alone, part)) for kind, part in _KINDS.items()},
        "calls": Counter(method for _, method in calls),
        "calls alone": sorted({method for one in alone for _, method in one["calls"]}),
        "structs": {file: _fields(file) for file in _STRUCTS},
    }


def _files(records: list[dict[str, Any]], part: str) -> list[str]:
    return sorted({file for one in records if part in one["title"] for file in one["files"]})


def _fields(file: str) -> dict[str, int]:
    """Return how many attributes each of a module's structs declares or sets; all have to exist."""
    tree = ast.parse((ROOT / f"{file}.py").read_text())
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    found = {}
    for name in _STRUCTS[file].split():
        declared = [one.target for one in classes[name].body if isinstance(one, ast.AnnAssign)]
        written = [*declared, *(one for one in ast.walk(classes[name]) if _is_set(one))]
        found[name] = len({ast.unparse(one).removeprefix("self.") for one in written})
    return found


def _is_set(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
        return False
    return ast.unparse(node.value) == "self"


def main() -> None:
    found = _measured()
    if "--json" in sys.argv:
        print_json(data=found)
        return
    table = Table("of our files", "files", "lines", "files without a turn")
    for kind, names in found["files"].items():
        table.add_row(kind, *map(str, (len(names), found["lines"][kind], found["alone"][kind])))
    show(table)
    table = Table("call of the table before the first token", "calls", "without a turn, too")
    for method, count in found["calls"].items():
        table.add_row(method, str(count), "yes" if method in found["calls alone"] else "")
    show(table)
    structs = {name: fields for one in found["structs"].values() for name, fields in one.items()}
    show(f"{len(structs)} structs hold facts of a turn, {sum(structs.values())} fields:", structs)


if __name__ == "__main__":
    main()
