"""The sockets that an engine's processes talk through, without a name that stays.

ZeroMQ makes them as files in the folder for temporary ones, six for each engine, and only the
process that made one removes it: of a killed engine they stay. But nobody connects to them once the
engine has started, and connections do without the name.

vLLM 0.29.0 binds all of them while it starts, in the folder that ``VLLM_RPC_BASE_PATH`` names:
check that when its version changes.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

_FOLDER = "VLLM_RPC_BASE_PATH"


@contextlib.contextmanager
def unnamed_afterwards() -> Iterator[None]:
    """Start an engine within this: what its processes bind has no name any more at the end.

    Nobody else but this user can connect meanwhile. Processes started within keep the folder's name
    in their environment.
    """
    before = os.environ.get(_FOLDER)
    # Short: a socket's path has 107 bytes at most, and a UUID of 36 follows.
    os.environ[_FOLDER] = folder = tempfile.mkdtemp(prefix="conserve-")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before
        shutil.rmtree(folder, ignore_errors=True)
