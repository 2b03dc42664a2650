"""Measures what traces cost: warm turns of an application with them, against one without.

Two applications of one prefiller and one decoder are up at the same time, on the same settings but
for `tracing.endpoint`, and measured in turn, as `experiments/warm.py` says. A collector that takes
all and keeps nothing runs beside them.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from experiments import warm

_COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
_PORT = 8193


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Have a collector run for the time of a ``with`` block; yield its URL."""
    process = subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = warm.experiment("tracing", __doc__)
    experiment.parse(arguments)
    with ExitStack() as stack:
        endpoint = f"tracing.endpoint={stack.enter_context(collector())}"
        name = "without traces"
        systems = [warm.System(name, stack.enter_context(experiment.serving(name=name)))]
        name = "with traces"
        traced = experiment.serving("lmcache.port=0", endpoint, port=_PORT, name=name)
        systems.append(warm.System(name, stack.enter_context(traced)))
        warm.compare(experiment, systems)


if __name__ == "__main__":
    main()
