"""Measures what ConServe costs: warm turns through it, against the bare engine's own server.

The same engine settings behind vLLM's OpenAI server, behind ConServe (one engine that does
everything), behind vLLM's router and behind Ray Serve LLM with direct streaming, the faster of its
two ingresses (`conserve_lab.peers` has their settings). All are up at the same time, with an engine
each, and measured in turn, as `experiments/warm.py` says. Ray Serve LLM sends several tokens at a
time. With ``--beside`` there is one more ConServe, with other settings.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack

from conserve_lab.peers import Options
from conserve_lab.peers.apart import start_apart
from conserve_lab.peers.plan import free_port
from experiments import warm

BARE, CONSERVE = "vllm", "conserve"
PEERS = "vllm_router,ray_serve_llm"
_BESIDE_PORT = 8193


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = warm.experiment("overhead", __doc__)
    experiment.option("--peers", PEERS, "beside the bare server and ConServe; '': none")
    add = experiment.parser.add_argument
    add("--beside", metavar="NAME=VALUE", nargs="+", help="settings of one more ConServe")
    add("--client-core", type=int, help="pin this process to a core")
    options = experiment.parse(arguments)
    if options.client_core is not None:
        os.sched_setaffinity(0, {options.client_core})
    peers = {}
    with ExitStack() as stack:
        for name in (BARE, *filter(None, options.peers.split(","))):
            one = Options(engines=1, port=free_port(), logs=experiment.logs)
            started = start_apart(name, one, experiment.console.print)
            peers[name] = warm.System(name, stack.enter_context(started).peer.url)
        alone = experiment.serving("lmcache.port=0", prefillers=0)
        systems = [peers.pop(BARE), warm.System(CONSERVE, stack.enter_context(alone))]
        systems += peers.values()
        if options.beside:
            name = f"{CONSERVE}, {' '.join(options.beside)}"
            beside = experiment.serving(
                "lmcache.port=0", *options.beside, prefillers=0, port=_BESIDE_PORT, name=name
            )
            systems.append(warm.System(name, stack.enter_context(beside)))
        warm.compare(experiment, systems)


if __name__ == "__main__":
    main()
