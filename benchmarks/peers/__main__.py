"""``python -m benchmarks.peers``."""

from benchmarks.peers.command import peers

if __name__ == "__main__":
    peers()
