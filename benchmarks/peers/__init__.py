"""The systems that ConServe is compared with, each started with its best documented settings.

    with start("collocated", Options(engines=2)) as peer:
        measure(peer.url)

They run the same model with the same engine arguments on as many engines, bound to as many
cores. One module a peer says what its settings are, and where they are documented.
"""

from benchmarks.peers.options import Options
from benchmarks.peers.plan import PeerUnavailable
from benchmarks.peers.running import PEERS, Peer, start

__all__ = ["PEERS", "Options", "Peer", "PeerUnavailable", "start"]
