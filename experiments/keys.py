"""Measures what keys cost: warm turns with a key, against the same without any.

One application (one prefiller, one decoder), and before it two routers that differ in nothing but
the key file. They are measured in turn, as `experiments/warm.py` says. The tenant has every limit,
and reaches none.
"""

from collections.abc import Sequence
from pathlib import Path

from conserve.settings import Settings
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from experiments import doors, warm
from experiments.doors import Door

OFF, ON = "no keys", "keys"
_DAY = "2026-01-01"


def make_keys(path: Path) -> str:
    """Write a key file with one tenant, that has every limit; returns its key."""
    content, key = KeyFile.new().with_key("bench", _DAY)
    limits = Limits(turns=10**6, held_tokens=10**9, conversations=10**6, new_per_minute=10**6)
    keyfile.write(path, content.with_tenant("bench", Tenant(limits)))
    return key


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = warm.experiment("keys", __doc__)
    experiment.hidden("--door", type=int)
    experiment.hidden("--keys-file")
    options = experiment.parse(arguments)
    if options.door is not None:
        doors.serve(options.door, Settings(keys_file=options.keys_file))
        return
    path = experiment.logs / "keys.json"
    headers = {ON: {"Authorization": f"Bearer {make_keys(path)}"}}
    both = [Door(OFF), Door(ON, ("--keys-file", str(path)))]
    with doors.opened(experiment, both) as urls:
        systems = [warm.System(name, url, headers.get(name, {})) for name, url in urls.items()]
        warm.compare(experiment, systems)


if __name__ == "__main__":
    main()
