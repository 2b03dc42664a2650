"""What processes leave on a machine: files, shared memory, sockets, ports."""

from pathlib import Path

import psutil

from conserve.launch import shared_memory_of

# Ray keeps its sessions, logs for the most part, for whoever looks for a cause; PyTorch what it has
# compiled, for the next start.
_KEPT = ("/tmp/ray/", "/tmp/torchinductor_")


class Traces:
    """Looks at the processes below this one now and then, and later at what is left of them.

    Args:
        own: a folder whose files are meant to stay.
    """

    def __init__(self, own: Path) -> None:
        self._kept = (*_KEPT, f"{own}/")
        self._files: set[Path] = set()
        self._ports: set[int] = set()

    def look(self) -> None:
        """See what the processes that run now have."""
        below = psutil.Process().children(recursive=True)
        self._files |= shared_memory_of(process.pid for process in below)
        for process in below:
            try:
                paths = [opened.path for opened in process.open_files()]
                for connection in process.net_connections("all"):
                    if isinstance(connection.laddr, str):
                        paths.append(connection.laddr)
                    elif connection.status == psutil.CONN_LISTEN:
                        self._ports.add(connection.laddr.port)
            except psutil.Error:
                continue
            for path in paths:
                if path.startswith(("/tmp/", "/dev/shm/")) and not path.startswith(self._kept):
                    self._files.add(Path(path))

    def left(self) -> list[str]:
        """What is still there, now that all of them have ended."""
        listening = {
            connection.laddr.port
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        files = sorted(str(path) for path in self._files if path.exists())
        return files + [f"port {port}" for port in sorted(self._ports & listening)]
