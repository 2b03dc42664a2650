"""Recorded agent sessions, replayed with prompts and outputs of exactly the recorded lengths.

**Prompts** are token ids. Each block of a prompt becomes tokens that depend on the session and the
block's id alone, and what follows the last whole block becomes tokens of that one call. So two
prompts of a session share the prefix that the recording says, to the token. A prompt's first
``tool_tokens + system_tokens`` tokens come from streams that sessions share (the tools' one by its
length, the system prompt's by both lengths), as far as the prompt's blocks are those the session
usually begins with. In place of the model's answers later prompts have other tokens.

**Outputs** have the recorded length, at least 1. A turn is effective where the recording stopped
with ``end_turn``.

**Gaps** are ``t(next) - (t + api_time)``, not less than 0. ``t`` is in whole seconds, so a gap is
right to a second; ``think_time`` is the same rounded, and not used. A call without ``api_time``
(one in nine) is taken to have lasted as long as the session's median call, and no longer than until
the next one began.

**Sub-agents** are conversations of their own. They arrive when they did in the recording, less what
scaling and capping took from the gaps before, and fewer tokens from the calls. The parent waits for
one as long as in the recording, less what was taken from the sub-agent's own, unless it was started
in the background. Both follow the recording's clock, not the run's.

**Scale.** With ``scale_tokens`` every position in a prompt moves from ``p`` to
``floor(p * scale_tokens)``, so reused and new tokens keep their ratios to within a token.
"""

import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from conserve_lab.workloads.plan import (
    Arrivals,
    Arriving,
    PlayedScript,
    Turns,
    Workload,
    WorkloadError,
    choose,
    require,
)
from conserve_lab.workloads.replay import Changes, Replay
from conserve_lab.workloads.tokens import check_vocabulary, key
from conserve_lab.workloads.traces import RecordedSession, read_session, recordings

_MAX_KEYS_TRIED = 1000


def recorded(
    source: Path | Sequence[Path],
    *,
    sessions: int,
    arrivals: Arrivals,
    vocabulary: range,
    changes: Changes | None = None,
    max_turns: int | None = None,
    seed: int = 0,
) -> Workload:
    """Recorded sessions, drawn without repeating one until all were drawn.

    All that are drawn are read and checked here. One that is drawn again has other tokens, but for
    what sessions share.

    Args:
        source: a folder of recordings, or files.
        sessions: how many are drawn; their sub-agents are conversations besides.
        vocabulary: token ids to use; it should leave out the model's special tokens.
        max_turns: sessions with more turns, sub-agents' not counted, are left out.

    Raises WorkloadError: a setting is wrong, a recording is broken, or no session is left.
    """
    require(sessions > 0, f"{sessions} sessions are asked for; give a number from 1")
    require(seed >= 0, f"the seed is {seed}; give one from 0")
    require(
        max_turns is None or max_turns > 0,
        f"max_turns is {max_turns}; give a number from 1, or none",
    )
    check_vocabulary(vocabulary)
    changes = changes or Changes()
    found = recordings(source)
    replays: dict[str, Replay] = {}
    chosen: list[Replay] = []
    left_out: set[str] = set()
    for drawn, recording in enumerate(choose(found, seed)):
        if recording.name not in replays:
            session = read_session(recording)
            require(
                session.block_tokens * changes.scale_tokens >= 1,
                f"scale_tokens is {changes.scale_tokens:g}, so blocks of {session.block_tokens} "
                f"tokens vanish; give at least {1 / session.block_tokens:g}",
            )
            replays[recording.name] = Replay(session, changes, vocabulary, seed)
        replay = replays[recording.name]
        if replay.turns and (max_turns is None or len(replay.session.calls) <= max_turns):
            chosen.append(replay)
        else:
            left_out.add(recording.name)
        if len(chosen) == sessions:
            break
        require(
            drawn + 1 < len(found) or bool(chosen),
            f"no session of {source} has a first turn that fits into "
            f"{changes.max_context_tokens or 'any number of'} tokens"
            + (f", and at most {max_turns} turns" if max_turns else "")
            + "; scale the tokens down, or allow more",
        )
    return Workload(
        "recorded",
        _counts(chosen) | {"sessions_left_out": len(left_out)},
        partial(_arrive, chosen, arrivals, seed),
    )


def _counts(chosen: Sequence[Replay]) -> dict[str, int]:
    agents = [replay for root in chosen for _, _, replay in root.agents("", 0.0)]
    # These include the sub-agents that the cut calls would have started.
    planned = [session for root in chosen for session in _sessions(root.session)]
    turns = sum(replay.turns for replay in agents)
    made = [call for replay in agents for call in replay.session.calls[: replay.turns]]
    unhashed = sum(
        not call.kept_blocks + len(call.new_blocks) and call.prompt_tokens >= r.session.block_tokens
        for r in agents
        for call in r.session.calls[: r.turns]
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
        "outputs_lengthened": sum(call.output_tokens == 0 for call in made),
    } | ({"prompts_without_hash_ids": unhashed} if unhashed else {})


def _sessions(session: RecordedSession) -> Iterator[RecordedSession]:
    yield session
    for sub in session.sub_agents:
        yield from _sessions(sub.session)


def _arrive(chosen: Sequence[Replay], arrivals: Arrivals, seed: int) -> Iterator[Arriving]:
    """Yield conversations as they arrive; sub-agents do between the sessions that come later."""
    waiting: list[tuple[float, str, Replay, int]] = []
    for index, (replay, at_s) in enumerate(zip(chosen, arrivals.times_s(), strict=False)):
        while waiting and waiting[0][0] <= at_s:
            yield _start(heapq.heappop(waiting))
        name = f"{index:05d}-{replay.session.name}"
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
