"""Recorded agent sessions, replayed with prompts and outputs of exactly the recorded lengths.

Prompts are token ids. Each block becomes tokens that depend on the session and the block's id
alone, what follows the last whole block tokens of that one call, and what a session begins with
(`RecordedSession.begins`) tokens of streams that sessions share. So two prompts share the prefix
that the recording says, to the token. In place of the model's answers they have other tokens.
"""

import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path

import numpy as np

from conserve_lab.workloads import files, messages, mooncake, recordings, traces
from conserve_lab.workloads.plan import (
    Arrivals,
    Arriving,
    PlayedScript,
    Turns,
    Workload,
    WorkloadError,
    at_least,
    choose,
    require,
)
from conserve_lab.workloads.replay import Changes, Replay
from conserve_lab.workloads.tokens import check_vocabulary, key

_MAX_KEYS_TRIED = 1000
_FORMATS = {"requests": traces.Session} | messages.FORMATS
_MOONCAKE = re.compile(rb'[{,]\s*"(input_length|hash_ids)"\s*:')


def recorded(
    source: Path,
    *,
    sessions: int,
    arrivals: Arrivals,
    vocabulary: range,
    changes: Changes | None = None,
    max_turns: int | None = None,
    skip_bad: bool = False,
    tokenizer: Path | None = None,
    seed: int = 0,
) -> Workload:
    """Recorded sessions, drawn without repeating one until all were drawn.

    All that are drawn are read and checked here. One that is drawn again has other tokens, but for
    what sessions share.

    Args:
        source: a folder of recordings, or a file.
        skip_bad: leave bad lines and files out, and say how many there are.
        tokenizer: for texts, a folder or file; None: an estimate.
        sessions: how many are drawn; their sub-agents are conversations besides.
        vocabulary: token ids to use; it should leave out the model's special tokens.
        max_turns: sessions with more turns, sub-agents' not counted, are left out.

    Raises WorkloadError: a setting is wrong, a recording is broken, or no session is left.
    """
    at_least(0, seed=seed)
    at_least(1, sessions=sessions, max_turns=max_turns)
    check_vocabulary(vocabulary)
    changes = changes or Changes()
    skipped: files.Skipped = [] if skip_bad else None
    found = recorded_sessions(source, skipped, tokenizer)
    replays: dict[str, Replay | None] = {}
    chosen: list[Replay] = []
    left_out: set[str] = set()
    for drawn, name in enumerate(choose([*found], seed) if found else ()):
        if name not in replays:
            replays[name] = None
            with files.skipping(skipped):
                replays[name] = Replay(found[name](), changes, vocabulary, seed)
        replay = replays[name]
        if replay is None or not replay.turns or len(replay.session.calls) > (max_turns or inf):
            left_out.add(name)
        else:
            chosen.append(replay)
        once = arrivals.pattern == "recorded" or not chosen
        if len(chosen) == sessions or (drawn + 1 == len(found) and once):
            break
    require(
        bool(chosen),
        f"no session of {source} has a first turn that fits into "
        f"{changes.max_context_tokens or 'any number of'} tokens"
        + (f", and at most {max_turns} turns" if max_turns else "")
        + ". ".join(("; scale the tokens down, or allow more", *files.notes_of(skipped))),
    )
    if arrivals.pattern == "recorded":
        chosen.sort(key=lambda replay: replay.session.at_s or 0.0)
        arrivals = replace(arrivals, at_s=tuple(replay.session.at_s for replay in chosen))
    assumed = dict.fromkeys(one for replay in chosen for one in replay.session.assumed)
    return Workload(
        "recorded",
        _counts(chosen) | {"sessions_left_out": len(left_out)},
        partial(_arrive, chosen, arrivals, seed),
        (*files.notes_of(skipped), *(f"Assumed: {one}" for one in assumed)),
    )


def recorded_sessions(
    source: Path, skipped: files.Skipped = None, tokenizer: Path | None = None
) -> dict[str, Callable[[], traces.RecordedSession]]:
    """Return what reads each session in a folder of recordings, or in files, by its name."""
    count = messages.counter(tokenizer)
    found: dict[str, Callable[[], traces.RecordedSession]] = {}
    for file, group in groupby(files.recordings(source, skipped), key=lambda one: one.file):
        head = files.head_of(file)
        own = b'"conserve_recording"' in head
        if own or (b'"requests"' not in head and _MOONCAKE.search(head)):
            read = recordings.sessions_of if own else mooncake.sessions_of
            made = read([*group], skipped)
            found |= {f"{file}: {one.name}": partial(lambda one: one, one) for one in made}
        else:
            found |= {one.name: partial(_read, one, count) for one in group}
    return found


def _read(recording: files.Recording, count: Callable[[str], int]) -> traces.RecordedSession:
    raw = files.read_json(recording, _FORMATS)
    if isinstance(raw, messages.Conversation):
        return messages.recorded_session(raw, recording.name, count)
    return traces.checked(raw, recording.name)


def _counts(chosen: Sequence[Replay]) -> dict[str, int]:
    agents = [replay for root in chosen for _, _, replay in root.agents("", 0.0)]
    # These include the sub-agents that the cut calls would have started.
    planned = [session for root in chosen for session in _sessions(root.session)]
    turns = sum(replay.turns for replay in agents)
    made = [(r.session.block_tokens, c) for r in agents for c in r.session.calls[: r.turns]]
    unhashed = sum(
        not call.kept_blocks + len(call.new_blocks) and call.prompt_tokens >= block
        for block, call in made
    )
    return {
        "sessions": len(chosen),
        "conversations": len(agents),
        "turns": turns,
        "conversations_cut": sum(replay.turns < len(replay.session.calls) for replay in agents),
        "sub_agents_left_out": len(planned) - len(agents),
        "turns_left_out": sum(len(session.calls) for session in planned) - turns,
        "gaps_estimated": sum(
            call.estimated for r in agents for call in r.session.calls[: r.turns - 1]
        ),
        "outputs_lengthened": sum(call.output_tokens == 0 for _, call in made),
    } | ({"prompts_without_hash_ids": unhashed} if unhashed else {})


def _sessions(session: traces.RecordedSession) -> Iterator[traces.RecordedSession]:
    yield session
    for sub in session.sub_agents:
        yield from _sessions(sub.session)


def _arrive(chosen: Sequence[Replay], arrivals: Arrivals, seed: int) -> Iterator[Arriving]:
    """Yield conversations as they arrive; sub-agents do between the sessions that come later."""
    waiting: list[tuple[float, str, Replay, int]] = []
    for index, (replay, at_s) in enumerate(zip(chosen, arrivals.times_s(), strict=False)):
        while waiting and waiting[0][0] <= at_s:
            yield _start(heapq.heappop(waiting))
        name = f"{index:05d}-{replay.name}"
        own = _own_key(replay, name, seed)
        for arrival_s, agent_name, agent in replay.agents(name, at_s):
            heapq.heappush(waiting, (arrival_s, agent_name, agent, own))
    while waiting:
        yield _start(heapq.heappop(waiting))


def _start(arriving: tuple[float, str, Replay, int]) -> Arriving:
    arrival_s, name, agent, own = arriving
    return arrival_s, PlayedScript(name, _play(agent, own))


def _play(replay: Replay, own: int) -> Turns:
    blocks = np.empty(0, dtype=np.int64)
    for turn, call in enumerate(replay.session.calls[: replay.turns]):
        blocks = np.concatenate((blocks[: call.kept_blocks], call.new_blocks))
        yield replay.request(own, turn, blocks)


def _own_key(replay: Replay, name: str, seed: int) -> int:
    """Return the first of this session's keys with which prompts share no more than they should."""
    for attempt in range(_MAX_KEYS_TRIED):
        own = key(seed, "session", name, attempt)
        if replay.tells_apart(own):
            return own
    raise WorkloadError(
        f"the vocabulary is too small to tell the prompts of {replay.session.name} apart; "
        "give a larger range of token ids"
    )
