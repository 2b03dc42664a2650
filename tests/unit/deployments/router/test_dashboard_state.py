"""The dashboard's reducer of events, run in Node where that is installed."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT

NODE = shutil.which("node")


def _can_run_the_page() -> bool:
    if NODE is None:
        return False
    told = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True)
    return int(told.stdout.lstrip("v").partition(".")[0]) >= 18


pytestmark = pytest.mark.skipif(
    not _can_run_the_page(), reason="Node 18 or newer is not installed (Debian: nodejs)"
)

_SCRIPT = """
import { readFileSync } from "node:fs";
const { newState, apply, setEngines, setConversations, missed, trim, source, phaseOf, occupancy,
  countPhases, byFamily } = await import(process.argv[1]);
const state = newState();
setEngines(state, ["a", "b", "p"].map((id) => ({ id, role: id === "p" ? "prefiller" : "decoder",
  capacity_tokens: 1000, held_tokens: 0, conversations: 0 })), 0);
const then = { setConversations, missed, trim };
for (const [kind, ...given] of JSON.parse(readFileSync(0))) {
  if (kind === "event") apply(state, given[0]);
  else then[kind](state, ...given);
}
console.log(JSON.stringify({
  conversations: Object.fromEntries([...state.conversations.values()].map((one) => [one.id, {
    moves: one.moves, ended: one.ended, ttfet: one.ttfet,
    histories: [...one.histories.values()].map((history) => ({
      phase: phaseOf(history), engine: history.engine, held: history.held,
      segments: history.segments.map((each) => [each.kind, each.a, each.b, each.engine]),
      homes: history.homes.map((each) => [each.engine, each.a, each.b]),
      marks: history.marks.map((each) => [each.kind, each.text]),
      turns: history.turns.map((turn) => ({ ...turn, source: source(state, turn) })),
    })),
  }])),
  waiting: state.waiting.size, slow: state.slow.map((one) => one.why), turns: state.turns,
  counts: countPhases(state), segments: state.segments,
  families: byFamily([...state.conversations.values()]).map((one) => [one.id, one.depth]),
  held: Object.fromEntries([...occupancy(state)].map(([id, one]) => [id, one.total])),
}));
"""


def told(tmp_path: Path, *happened: tuple[Any, ...]) -> dict[str, Any]:
    """Return the page's state after these events, or calls by their names."""
    module = tmp_path / "state.mjs"
    shutil.copy(ROOT / "deployments" / "router" / "page" / "state.js", module)
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", _SCRIPT, str(module)],
        input=json.dumps(happened), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def event(kind: str, at: float, conversation: str | None = "c", **details: Any) -> tuple[Any, ...]:
    of = {} if conversation is None else {"conversation": conversation}
    return ("event", {"kind": kind, "at": at, **of, **details})


def first_turn(decoder: str = "a", conversation: str = "c") -> list[tuple[Any, ...]]:
    """A turn that is prefilled elsewhere, from 10 to 15 s."""
    counts = {"prompt_tokens": 400, "cached_tokens": 0, "loaded_tokens": 384, "output_tokens": 50}
    return [
        event("place", 10, conversation, decoder=decoder, prefiller="p", tokens=400, new=True),
        event("start", 10, conversation, turn=1, decoder=decoder, prefiller="p"),
        event("prefilled", 12, conversation, turn=1, prefiller="p", tokens=400, loaded_tokens=0),
        event("end", 15, conversation, turn=1, decoder=decoder, decode_s=2.5, **counts),
        event(
            "answered", 15, conversation, turn=1, outcome="completed", latency_s=5, ttft_s=2.5,
            ttfet_s=2.6,
        ),
    ]  # fmt: skip


def test_a_conversation_has_a_history_with_each_model(tmp_path: Path) -> None:
    begun = [
        event("place", 10 + at, decoder=decoder, tokens=4, new=True, model=model)
        for at, (decoder, model) in enumerate((("a", "big"), ("b", "small")))
    ]
    found = told(tmp_path, *begun)["conversations"]["c"]
    assert [one["homes"] for one in found["histories"]] == [[["a", 10, None]], [["b", 11, None]]]
    assert found["moves"] == 0


def test_a_turn_is_divided_at_its_prefill_and_its_first_token(tmp_path: Path) -> None:
    found = told(tmp_path, *first_turn())
    (history,) = found["conversations"]["c"]["histories"]
    assert history["segments"] == [
        ["prefill", 10, 12, "p"],
        ["handoff", 12, 12.5, "a"],
        ["decode", 12.5, 15, "a"],
    ]
    assert (history["phase"], history["engine"], history["held"]) == ("idle", "a", 450)
    assert found["conversations"]["c"]["ttfet"] == 2.6
    (turn,) = history["turns"]
    assert turn["source"] == (
        "first turn of its history; prefilled on C, handed off to A; 384 from LMCache, 16 computed "
        "there"
    )
    # What a prefiller has just computed is no cache hit.
    assert found["turns"] == [{"at": 15, "prompt": 400, "own": 0, "host": 0}]
    assert found["held"] == {"a": 450}


def test_a_lost_engines_conversations_move_with_their_next_turn(tmp_path: Path) -> None:
    lost = [
        *first_turn(),
        event("start", 20, turn=2, decoder="a", later=True),
        event("cut", 21, turn=2, decoder="a"),
        event("engine_lost", 21, None, engine="a", role="decoder", why="gone", unbound=1),
    ]
    (history,) = told(tmp_path, *lost)["conversations"]["c"]["histories"]
    assert (history["phase"], history["engine"]) == ("lost", None)
    assert history["homes"] == [["a", 10, 21]]
    moved = [
        *lost,
        event("restore", 22, decoder="b", where="reloaded"),
        event("place", 22, decoder="b", tokens=450, new=False, moved=True),
        event("start", 22, turn=3, decoder="b"),
    ]
    found = told(tmp_path, *moved)
    (history,) = found["conversations"]["c"]["histories"]
    assert found["conversations"]["c"]["moves"] == 1
    assert history["homes"] == [["a", 10, 21], ["b", 22, None]]
    assert history["marks"] == [
        ["cut", "engine A was lost in mid-turn"],
        ["moved", "moved from A to B, because A was lost"],
    ]
    assert (
        "engine A was lost, so it was reloaded from host memory" in history["turns"][-1]["source"]
    )


def test_waits_pauses_and_tools_begin_and_end(tmp_path: Path) -> None:
    happened = [
        event("wait", 5, why="room", tokens=400, ahead=0, missing_tokens=90, decoders=2),
        *first_turn(),
        event("tool_start", 16, tool="bash", call_id="x"),
        event("tool_end", 18, tool="bash", call_id="x", wall_s=2),
        event("pause", 30, decoder="a", reason="room", freed_tokens=450),
    ]
    waiting = told(tmp_path, happened[0])
    assert (waiting["waiting"], waiting["counts"]["waiting"]) == (1, 1)
    found = told(tmp_path, *happened)
    (history,) = found["conversations"]["c"]["histories"]
    kinds = [(kind, a, b) for kind, a, b, _ in history["segments"]]
    assert kinds[0] == ("waiting", 5, 10)
    assert kinds[-2:] == [("tool", 16, 18), ("paused", 30, None)]
    assert (found["waiting"], history["phase"], found["held"]) == (0, "paused", {})
    assert history["turns"][0]["waited"] == 5
    # A wait that was in vain leaves it as it was.
    vain = [
        event("wait", 40, why="room", tokens=400, ahead=0, missing_tokens=90, decoders=2),
        event("refuse", 50, code="timeout"),
    ]
    found = told(tmp_path, *happened, *vain)
    assert found["conversations"]["c"]["histories"][0]["phase"] == "paused"
    assert found["waiting"] == 0


def test_what_was_missed_ends_what_was_open_and_a_list_says_what_lives(tmp_path: Path) -> None:
    listed = {
        "id": "d", "phase": "acting", "turns": 3, "held_tokens": 200, "decoder": "b", "moves": 0,
        "ttfet_s": None, "created": 1, "last_used": 39,
    }  # fmt: skip
    found = told(
        tmp_path,
        *first_turn(),
        event("start", 20, turn=2, decoder="a", later=True),
        ("missed", 9, 40),
        ("setConversations", {"data": [listed], "total": 1}, 40),
    )
    one, two = found["conversations"]["c"], found["conversations"]["d"]
    assert one["ended"] == 40
    assert one["histories"][0]["segments"][-1][:3] == ["decode", 20, 20]
    assert (two["ended"], two["histories"][0]["engine"]) == (None, "b")
    assert found["held"] == {"b": 200}


def test_a_turn_whose_end_no_table_tells_does_not_run_for_ever(tmp_path: Path) -> None:
    listed = {
        "id": "c", "phase": "acting", "turns": 2, "held_tokens": 460, "decoder": "a", "moves": 0,
        "ttfet_s": None, "created": 10, "last_used": 25,
    }  # fmt: skip
    found = told(
        tmp_path,
        *first_turn(),
        event("start", 20, turn=2, decoder="a", later=True),
        ("setConversations", {"data": [listed], "total": 9}, 30),
    )
    (history,) = found["conversations"]["c"]["histories"]
    assert (history["phase"], history["engine"]) == ("idle", "a")
    assert [turn["outcome"] for turn in history["turns"]] == ["completed", "end unknown"]


def test_children_stand_below_their_parents(tmp_path: Path) -> None:
    begun = {"a": "p", "b": "p", "p": None, "of a": "a", "x": "y", "y": "x", "own": "own", "z": "?"}
    happened = [event("place", 1, one, decoder="a", parent=of) for one, of in begun.items()]
    other = event("place", 2, "b", decoder="a", parent="p", tenant="another")
    found = told(tmp_path, *happened, other)["families"]
    assert "".join(f"{depth}{id} " for id, depth in found) == "0p 1a 2of a 1b 0z 0b 0x 1y 0own "


def test_what_made_a_turn_no_slower_is_noted_apart(tmp_path: Path) -> None:
    turn, note = first_turn(), "brought back 0.4 s before the turn"
    turn[3][1]["note"] = note
    found = told(tmp_path, *turn)
    (history,) = found["conversations"]["c"]["histories"]
    assert (history["marks"], found["slow"]) == ([["noted", note]], [])
    assert note in history["turns"][0]["source"]
