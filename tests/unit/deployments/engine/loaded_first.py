"""A module that a process loads first; see `test_core`."""

import sys
from multiprocessing.connection import Connection


def tell(sender: Connection) -> None:
    """Send the name by which this file was run in this process before anything else."""
    main = sys.modules["__mp_main__"]
    sender.send(main.__name__ if main.__doc__ == __doc__ else "another file")
