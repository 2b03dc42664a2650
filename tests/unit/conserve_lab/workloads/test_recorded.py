"""Recorded sessions are replayed as recorded: lengths, reuse, order, gaps, sub-agents."""

import gzip
import json
import statistics
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from conserve_lab.records import Script, TurnRequest
from conserve_lab.workloads import Arrivals, Changes, Workload, WorkloadError, recorded
from tests.checkout import DATA

FOLDER = DATA / "claude-code-traces"
# Some of all, some of the few that have sub-agents, and one that changes its system prompt.
FILES = sorted(
    {
        *sorted(FOLDER.glob("*.json.gz"))[::8],
        *(FOLDER / f"trace_{number}.json.gz" for number in ("0003", "0049", "0277", "0291")),
    }
)
VOCABULARY = range(300, 4_000)
TOGETHER = Arrivals("together")

Json = dict[str, Any]

with_data = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded sessions at {DATA}")


def replay(
    source: Any, sessions: int = 1, seed: int = 0, max_turns: int | None = None, **changes: Any
) -> Workload:
    return recorded(
        source, sessions=sessions, arrivals=TOGETHER, vocabulary=VOCABULARY,
        changes=Changes(**changes), max_turns=max_turns, seed=seed,
    )  # fmt: skip


def turns(script: Script) -> list[TurnRequest]:
    return list(iter(lambda: script.next(None), None))


def all_turns(workload: Workload) -> dict[str, list[TurnRequest]]:
    return {script.conversation: turns(script) for _, script in workload}


def prompt(turn: TurnRequest) -> list[int]:
    tokens: list[int] = turn.body()["prompt"]
    return tokens


def common(left: list[Any], right: list[Any]) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)


# --- An independent reading of the recordings -----------------------------------------------------


def agents(session: Json) -> Iterator[tuple[str, list[Json]]]:
    """The calls of a session and of each of its sub-agents, with the replay's names for them."""
    started = [record for record in session["requests"] if record["type"] == "subagent"]
    name = f"00000-{session['id']}"
    yield name, [record for record in session["requests"] if record["type"] != "subagent"]
    for number, record in enumerate(started, start=1):
        yield f"{name}/{number}-{record['agent_id']}", record["requests"]


def reused(calls: list[Json]) -> list[int]:
    return [0, *(64 * common(a["hash_ids"], b["hash_ids"]) for a, b in pairwise(calls))]


def gaps(calls: list[Json]) -> list[float]:
    known = [call["api_time"] for call in calls if "api_time" in call]
    found = [calls[0]["t"]]
    for call, later in pairwise(calls):
        between = later["t"] - call["t"]
        took = call.get("api_time", min(statistics.median(known or [0.0]), between))
        found.append(max(0.0, between - took))
    return found


@cache
def read(path: Path) -> Json:
    with gzip.open(path, "rt") as file:
        session: Json = json.load(file)
    return session


@with_data
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_lengths_reuse_order_and_gaps_are_the_recorded_ones(path: Path) -> None:
    expected = dict(agents(read(path)))
    workload = replay(path)
    planned = all_turns(workload)
    assert set(planned) == set(expected)
    for name, calls in expected.items():
        made = planned[name]
        assert [turn.prompt_tokens for turn in made] == [call["in"] for call in calls]
        assert [turn.output_tokens for turn in made] == [max(1, call["out"]) for call in calls]
        assert [turn.effective for turn in made] == [call["stop"] == "end_turn" for call in calls]
        assert [turn.tool for turn in made] == [
            {"tool_use": "?", "end_turn": ""}.get(call["stop"]) for call in calls
        ]
        assert [turn.reused_tokens for turn in made] == reused(calls)
        assert [turn.gap_s for turn in made] == pytest.approx(gaps(calls), abs=1e-6)
    assert workload.counts["turns"] == sum(map(len, expected.values()))
    assert workload.counts["gaps_estimated"] == sum(
        "api_time" not in call for calls in expected.values() for call in calls[:-1]
    )


@with_data
def test_scaled_prompts_share_exactly_what_they_say() -> None:
    """Token by token, for every turn of every recording looked at."""
    compared = 0
    for path in FILES:
        for made in all_turns(replay(path, scale_tokens=1 / 50)).values():
            prompts = [prompt(turn) for turn in made]
            for (before, now), turn in zip(pairwise(prompts), made[1:], strict=True):
                assert common(before, now) == turn.reused_tokens
                compared += 1
    assert compared > 1_000


# --- Made sessions --------------------------------------------------------------------------------


def call(t: float, ids: Iterable[int], rest: int = 10, **fields: Any) -> Json:
    """A call whose prompt is these blocks and some tokens; it takes 2 s."""
    blocks = list(ids)
    made = {"type": "n", "t": t, "in": 64 * len(blocks) + rest, "out": 5, "hash_ids": blocks}
    return made | {"stop": "tool_use", "api_time": 2.0} | fields


def sub_agent(t: float, duration_s: float | None, *calls: Json) -> Json:
    made = {"type": "subagent", "t": t, "agent_id": "a", "tool_tokens": 0, "system_tokens": 0}
    lasting = {} if duration_s is None else {"duration_ms": duration_s * 1e3}
    return made | lasting | {"requests": list(calls)}


def session_file(
    folder: Path, *calls: Json, name: str = "made", tools: int = 0, system: int = 0
) -> Path:
    path = folder / f"{name}.json"
    session = {"id": name, "block_size": 64, "tool_tokens": tools, "system_tokens": system}
    path.write_text(json.dumps(session | {"requests": calls}))
    return path


def first_prompts(workload: Workload) -> list[list[int]]:
    return [prompt(turns(script)[0]) for _, script in workload]


def first_turns(workload: Workload) -> list[tuple[TurnRequest, TurnRequest]]:
    """The first turns of two conversations, either way round."""
    one, two = (made[0] for made in all_turns(workload).values())
    return [(one, two), (two, one)]


def said_to_share(one: TurnRequest, two: TurnRequest) -> int:
    """How many tokens two prompts have in common by what they say of themselves."""
    tokens = 0
    for mine, its in zip(one.shared, two.shared, strict=False):
        if mine.key != its.key:
            break
        tokens = min(mine.tokens, its.tokens)
        if mine.tokens != its.tokens:
            break
    return tokens


def test_no_output_becomes_one_token_and_is_counted(tmp_path: Path) -> None:
    workload = replay(session_file(tmp_path, call(0, [1], out=0), call(5, [1], out=7)))
    (made,) = all_turns(workload).values()
    assert [turn.output_tokens for turn in made] == [1, 7]
    assert workload.counts["outputs_lengthened"] == 1


def test_an_edited_history_that_comes_back_is_the_same_tokens(tmp_path: Path) -> None:
    path = session_file(
        tmp_path, call(0, [1, 2, 3]), call(9, [1, 4, 5]), call(19, [1, 2, 3, 6]), call(29, [1, 2])
    )
    (made,) = all_turns(replay(path)).values()
    first, edited, back, cut = map(prompt, made)
    assert [turn.reused_tokens for turn in made] == [0, 64, 64, 128]
    assert common(first, edited) == 64
    assert common(first, back) == 192
    assert common(back, cut) == 128


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(("tools", "system"), [(100, 60), (128, 64), (0, 0), (30, 0), (0, 700)])
def test_sessions_share_tools_and_system_prompt_to_the_token(
    tmp_path: Path, tools: int, system: int, scale: float
) -> None:
    for name, ids in (("one", range(1, 8)), ("two", range(50, 57))):
        session_file(tmp_path, call(0, ids), name=name, tools=tools, system=system)
    workload = replay(tmp_path, sessions=2, scale_tokens=scale)
    one, two = first_prompts(workload)
    # Only whole blocks of the prompt can be shared.
    assert common(one, two) == int(min(tools + system, 7 * 64) * scale)
    assert {said_to_share(*pair) for pair in first_turns(workload)} == {common(one, two)}


def test_sessions_with_the_same_tools_share_those(tmp_path: Path) -> None:
    session_file(tmp_path, call(0, range(6)), name="one", tools=100, system=60)
    session_file(tmp_path, call(0, range(6)), name="two", tools=100, system=61)
    workload = replay(tmp_path, sessions=2)
    one, two = first_prompts(workload)
    assert common(one, two) == 100
    assert {said_to_share(*pair) for pair in first_turns(workload)} == {100}


def test_a_break_inside_the_shared_part_is_kept(tmp_path: Path) -> None:
    calls = [call(0, [9, 8]), call(9, [1, 2, 3]), call(19, [1, 2, 4]), call(29, [1, 5, 6])]
    session_file(tmp_path, *calls, name="one", tools=100, system=60)
    session_file(tmp_path, call(0, [1, 2, 3]), name="two", tools=100, system=60)
    by_name = all_turns(replay(tmp_path, sessions=2))
    made = next(turns for name, turns in by_name.items() if "one" in name)
    (other,) = next(turns for name, turns in by_name.items() if "two" in name)
    prompts = list(map(prompt, made))
    assert [common(a, b) for a, b in pairwise(prompts)] == [0, 128, 64]
    # The head that most calls have is the shared one; the recording's odd ones are not.
    assert [common(prompt(other), tokens) for tokens in prompts] == [0, 160, 128, 64]
    assert [said_to_share(other, turn) for turn in made] == [0, 160, 128, 64]


def test_a_session_drawn_again_has_other_tokens_after_what_is_shared(tmp_path: Path) -> None:
    path = session_file(tmp_path, call(0, range(5)), tools=70, system=30)
    workload = replay(path, sessions=2)
    one, two = first_prompts(workload)
    assert common(one, two) == 100
    assert len(all_turns(workload)) == 2


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    for number in range(9):
        session_file(tmp_path, call(0, [1, 2]), call(9, [1, 2, 3]), name=f"s{number}")

    def everything(workload: Workload) -> list[Any]:
        return [(name, list(map(prompt, made))) for name, made in all_turns(workload).items()]

    workload = replay(tmp_path, sessions=5, seed=3)
    assert everything(workload) == everything(workload)
    assert everything(workload) == everything(replay(tmp_path, sessions=5, seed=3))
    other = everything(replay(tmp_path, sessions=5, seed=4))
    assert [name for name, _ in other] != [name for name, _ in everything(workload)]
    assert not any(made in [p for _, p in everything(workload)] for _, made in other)


def test_breaks_are_told_apart_with_a_small_vocabulary(tmp_path: Path) -> None:
    calls = [call(9 * n, [1, 2, 100 + n]) for n in range(40)]
    path = session_file(tmp_path, *calls, tools=64, system=20)
    for vocabulary in (range(5, 45), range(1_000, 1_400, 10)):
        workload = recorded(path, sessions=5, arrivals=TOGETHER, vocabulary=vocabulary)
        for made in all_turns(workload).values():
            prompts = list(map(prompt, made))
            assert set().union(*prompts) <= set(vocabulary)
            assert {common(a, b) for a, b in pairwise(prompts)} == {128}


def test_a_vocabulary_too_small_to_tell_breaks_apart_is_said(tmp_path: Path) -> None:
    path = session_file(tmp_path, *(call(9 * n, [1, 2, 100 + n]) for n in range(60)))
    workload = recorded(path, sessions=1, arrivals=TOGETHER, vocabulary=range(2))
    with pytest.raises(WorkloadError, match="vocabulary is too small"):
        list(workload)


# --- Gaps and sub-agents --------------------------------------------------------------------------


def test_a_call_of_unknown_length_is_taken_to_last_as_long_as_others(tmp_path: Path) -> None:
    unknown = call(20, [1])
    del unknown["api_time"]
    calls = [call(0, [1]), call(10, [1], api_time=4.0), unknown, call(30, [1]), unknown | {"t": 40}]
    (made,) = all_turns(replay(session_file(tmp_path, *calls, call(41, [1])))).values()
    # The median of 2, 4, 2 and 2 is 2; the last unknown one has 1 s before the next.
    assert [turn.gap_s for turn in made] == [0, 8, 6, 8, 8, 0]


def test_gaps_are_scaled_then_capped(tmp_path: Path) -> None:
    path = session_file(tmp_path, call(0, [1]), call(12, [1]), call(114, [1]))
    cases: list[tuple[Json, list[float]]] = [
        ({}, [0, 10, 100]),
        ({"scale_gaps": 0.5}, [0, 5, 50]),
        ({"scale_gaps": 0.5, "max_gap_s": 20.0}, [0, 5, 20]),
        ({"scale_gaps": 0.0}, [0, 0, 0]),
    ]
    for changes, expected in cases:
        (made,) = all_turns(replay(path, **changes)).values()
        assert [turn.gap_s for turn in made] == expected


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A parent that waits for two sub-agents at once, then starts one in the background."""
    return session_file(
        tmp_path,
        call(0, [1]),
        sub_agent(23, 20, call(0, [7]), call(12, [7, 8])),
        sub_agent(43, 40, call(0, [7]), call(32, [7, 9])),
        call(50, [1, 2]),
        sub_agent(53, None, call(0, [7])),
        call(60, [1, 2, 3]),
    )


def schedule(workload: Workload) -> tuple[list[float], list[list[float]]]:
    planned = [(at_s, [turn.gap_s for turn in turns(script)]) for at_s, script in workload]
    return [at_s for at_s, _ in planned], [gaps_s for _, gaps_s in planned]


@pytest.mark.parametrize(
    ("changes", "arrivals", "gaps_s"),
    [
        ({}, [0, 3, 3, 53], [[0, 48, 8], [0, 10], [0, 30], [0]]),
        # The longer one, whose gap of 30 s is 4 s, ends 15 s after the parent's call; 4 s follow.
        ({"max_gap_s": 4.0}, [0, 3, 3, 24], [[0, 19, 4], [0, 4], [0, 4], [0]]),
        # Its two calls of 2 s are followed by the 6 s until it ends.
        ({"scale_gaps": 0.0}, [0, 2, 2, 14], [[0, 10, 0], [0, 0], [0, 0], [0]]),
        # Each call lasts 1 s of 2: the longer sub-agent ends 2 s sooner after the parent's call.
        ({"scale_tokens": 0.5}, [0, 2, 2, 49], [[0, 46, 8], [0, 10], [0, 30], [0]]),
    ],
)
def test_sub_agents_start_and_are_waited_for_as_recorded(
    family: Path, changes: Json, arrivals: list[float], gaps_s: list[list[float]]
) -> None:
    assert schedule(replay(family, **changes)) == (arrivals, gaps_s)


def test_sessions_and_sub_agents_come_in_order_of_arrival(family: Path) -> None:
    workload = recorded(family, sessions=30, arrivals=Arrivals("even", 0.1), vocabulary=VOCABULARY)
    arrivals = [at_s for at_s, _ in workload]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == workload.counts["conversations"] == 120


# --- The model's context --------------------------------------------------------------------------


def test_a_session_is_cut_where_it_no_longer_fits_and_counted(family: Path) -> None:
    counts = replay(family, max_context_tokens=138 + 5).counts
    assert {name: count for name, count in counts.items() if count} == {
        "sessions": 1, "conversations": 4, "turns": 7, "conversations_cut": 1, "turns_left_out": 1,
    }  # fmt: skip
    workload = replay(family, max_context_tokens=138 + 4)
    assert workload.counts["turns"] == 3
    assert workload.counts["turns_left_out"] == 5
    # The background one was to be started by the parent's second call.
    assert workload.counts["sub_agents_left_out"] == 1
    assert sum(map(len, all_turns(workload).values())) == 3


def test_sessions_that_never_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    session_file(tmp_path, call(0, range(20)), name="long")
    session_file(tmp_path, call(0, [1]), name="short")
    workload = replay(tmp_path, sessions=6, max_context_tokens=500)
    assert {name.partition("-")[2] for name in all_turns(workload)} == {"short"}
    assert workload.counts["sessions_left_out"] == 1
    with pytest.raises(WorkloadError, match=r"no session of .* fits into 50 tokens"):
        replay(tmp_path, max_context_tokens=50)


def test_sessions_with_too_many_turns_are_left_out_and_counted(tmp_path: Path) -> None:
    session_file(tmp_path, *(call(10 * i, range(i + 1)) for i in range(3)), name="long")
    session_file(tmp_path, call(0, [1]), call(10, [1, 2]), name="short")
    workload = replay(tmp_path, sessions=3, max_turns=2)
    assert {name.partition("-")[2] for name in all_turns(workload)} == {"short"}
    assert workload.counts["sessions_left_out"] == 1
    assert replay(tmp_path, sessions=3, max_turns=3).counts["sessions_left_out"] == 0
    with pytest.raises(WorkloadError, match=r"and at most 1 turns"):
        replay(tmp_path, max_turns=1)
    with pytest.raises(WorkloadError, match="max_turns is 0"):
        replay(tmp_path, max_turns=0)
