"""Runs one application of `ray.serve.llm` on a Ray of its own, until it is told to stop.

``python -m conserve_lab.peers.ray_app BUILDER PORT CPUS ARGUMENTS``: a builder of `ray.serve.llm`,
the port on loopback, Ray's CPUs, and the builder's arguments as JSON (a Serve config's ``args``).
"""

import contextlib
import json
import signal
import sys

import ray
import ray.serve.llm
from ray import serve

from deployments.joining import keep_token


def main() -> None:
    builder, port, cpus, arguments = sys.argv[1:]
    keep_token()
    # RAY_ADDRESS would have it join another peer's Ray.
    ray.init(address="local", namespace="serve", num_cpus=int(cpus), include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(getattr(ray.serve.llm, builder)(json.loads(arguments)), blocking=False)
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    ray.shutdown()


if __name__ == "__main__":
    main()
