"""The systems that ConServe is compared with, each started with its best documented settings.

    with start("collocated", Options(engines=2)) as peer:
        measure(peer.url)

They run the same model with the same engine arguments on as many engines, bound to as many
cores. `systems` says what each one's settings are, and where they are documented.
"""

from conserve_lab.peers.plan import Options, PeerUnavailable
from conserve_lab.peers.running import Peer, start
from conserve_lab.peers.systems import PEERS
