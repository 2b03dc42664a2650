"""Starts an LMCache server that takes no core while it is idle, and whose memory needs no /dev/shm.

The changes to LMCache and NIXL are files of `deployments.upstream`.
"""

import logging
import resource
import sys

from deployments.upstream import named_pool, spinning_progress
from deployments.upstream.patch import require
from deployments.upstream.patches import apply_patches

# Value of `--shm-name` for a pool from `named_pool`.
OWN_POOL = "own"
_LOOK_UPS = "lmcache.v1.multiprocess.modules.lookup"


def lock_as_much_as_allowed() -> None:
    """Raise the limit of locked memory, which RDMA needs for all shared memory."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


def say_nothing_of_short_prompts() -> None:
    """Drop warnings that nothing is "touched" as a turn ends, where nothing is wrong.

    LMCache logs them for a prompt shorter than a chunk, and for a turn that it was not asked about.
    """

    def tells(record: logging.LogRecord) -> bool:
        return "skipping touch" not in str(record.msg)

    logging.getLogger(_LOOK_UPS).addFilter(tells)


def main() -> None:
    from lmcache.cli.main import main as lmcache

    if "nixl" in sys.argv:
        require(spinning_progress.PATCH)
        spinning_progress.sleep_when_idle()
        lock_as_much_as_allowed()
    if OWN_POOL in sys.argv:
        require(named_pool.PATCH)
        sys.argv[sys.argv.index(OWN_POOL)] = named_pool.offer()
    apply_patches("lmcache")
    say_nothing_of_short_prompts()
    lmcache()


if __name__ == "__main__":
    main()
