"""Reads Mooncake's traces: requests, a line each, which become sessions here.

A block's id stands for its tokens and all before them. So a request goes on with the session whose
last prompt it begins with, in whole blocks, if it is longer, and if no other had begun so. The size
of blocks is the one that fits most lines. Times are in ms.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any

import msgspec
import numpy as np

from conserve_lab.records import SharedPrefix
from conserve_lab.workloads import traces
from conserve_lab.workloads.files import Recording, Skipped, read_json, skipping
from conserve_lab.workloads.plan import require

# Mooncake's own, and others in use.
_BLOCKS_TOKENS = (512, 16, 32, 64, 128, 256, 1024)
_ASSUMED = "gaps last from one request to the next, and sessions end with an answer for users"


class _Request(msgspec.Struct):
    input_length: traces.Positive
    output_length: traces.Count = traces.ANSWER_TOKENS
    timestamp: traces.Time = 0.0
    hash_ids: list[int] = []

    def fits(self, block: int) -> bool:
        whole, rest = divmod(self.input_length, block)
        return not self.hash_ids or whole <= len(self.hash_ids) <= whole + bool(rest)


# A session's requests, each with a digest of every whole block and all before it.
_Requests = list[tuple[_Request, list[int]]]


def sessions_of(lines: Sequence[Recording], skipped: Skipped) -> Iterator[traces.RecordedSession]:
    """Yield the sessions of the requests in one file."""
    read: list[tuple[str, _Request]] = []
    for line in lines:
        with skipping(skipped):
            read.append((line.name, read_json(line, {"input_length": _Request})))
    block = max(_BLOCKS_TOKENS, key=lambda tokens: sum(one.fits(tokens) for _, one in read))
    requests: _Requests = []
    for name, one in sorted(read, key=lambda line: line[1].timestamp):
        with skipping(skipped):
            expected = f"one for each {block} of {one.input_length} tokens (input_length)"
            found = len(one.hash_ids)
            require(one.fits(block), f"{name}: hash_ids: expected {expected}, found {found}")
            ids = one.hash_ids[: one.input_length // block]
            digests = accumulate(ids, lambda before, id: hash((before, id)), initial=0)
            requests.append((one, [*digests][1:]))
    sessions = _linked(requests)
    longest = [max((chain for _, chain in session), key=len) for session in sessions]
    begun = beginnings(longest, block)
    for number, (session, (begins, head)) in enumerate(zip(sessions, begun, strict=True), 1):
        first_ms = session[0][0].timestamp
        calls = [
            traces.Call((one.timestamp - first_ms) / 1e3, one.input_length, one.output_length)
            for one, _ in session
        ]
        calls[-1].stop = "end_turn"
        blocks = [np.array(each, dtype=np.int64) for _, each in session]
        done = traces.calls_of(calls, blocks, head)
        name = f"{lines[0].file.name}-{number}"
        yield traces.RecordedSession(name, block, begins, done, assumed=(_ASSUMED,))


def beginnings(
    longest: Sequence[Sequence[int]], block: int
) -> Iterator[tuple[tuple[SharedPrefix, ...], Any]]:
    """Yield what each of these chains begins with as others do, and the digests of that."""
    users = Counter(digest for chain in longest for digest in chain)
    for chain in longest:
        shared = [*takewhile(lambda digest: users[digest] > 1, chain), 0]
        begins = tuple(
            SharedPrefix(digest, at * block)
            for at, (digest, after) in enumerate(pairwise(shared), 1)
            # Another session parts here.
            if users[after] < users[digest]
        )
        yield begins, np.array(shared[:-1], dtype=np.int64)


def _linked(requests: _Requests) -> list[_Requests]:
    sessions: list[_Requests] = []
    # Sessions by how their last prompt begins.
    last: dict[int, _Requests] = {}
    seen: set[int] = set()
    for one, chain in requests:
        before = next((digest for digest in reversed(chain) if digest in last), 0)
        if before and last[before][-1][0].input_length >= one.input_length:
            before = 0
        session = last.pop(before, [])
        if not session:
            sessions.append(session)
        session.append((one, chain))
        if chain and (chain[-1] == before or chain[-1] not in seen):
            last[chain[-1]] = session
        seen.update(chain)
    return sessions
