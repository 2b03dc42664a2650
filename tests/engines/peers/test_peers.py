"""Two peers, started once: each serves a conversation, whose later turns find their history.

The others are in `tests/engines/every_peer`.
"""

import os
from pathlib import Path

import pytest

from conserve_lab.peers.pinning import engine_processes
from tests.engines.peers.peers import affinity, converse, counted, started, threads

pytestmark = pytest.mark.usefixtures("machine_alone")


@pytest.mark.long
def test_ray_pd_moves_what_it_prefilled(tmp_path: Path) -> None:
    with started("ray_pd", tmp_path) as peer:
        first, second, third = converse(peer, "conversation")
        # The decode replica found all whole chunks of each prompt in LMCache.
        assert first >= 384
        assert first <= second <= third


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_conserve_with_a_core_an_engine(tmp_path: Path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    with started("conserve", tmp_path, cores=cores) as peer:
        before = counted(peer, "handoffs", "later_prefills")
        converse(peer, "conversation")
        after = counted(peer, "handoffs", "later_prefills")
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0]
        pinned = [
            {tuple(affinity(pid)) for pid in threads(engine)} for engine in engine_processes()
        ]
        assert sorted(pinned) == [{(core,)} for core in cores]
