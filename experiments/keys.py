"""Measures what keys cost: warm turns with a key, against the same without any.

    python -m experiments.keys [--rounds 40] [--json PATH]

One application (one prefiller, one decoder), and before it two routers that differ in nothing but
the key file. They are measured in turn, as `experiments.warm` says. The tenant has every
limit, and reaches none.
"""

import argparse
from pathlib import Path

from conserve.settings import Settings
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from experiments import doors
from experiments.doors import Door

_DAY = "2026-01-01"


def make_keys(path: Path) -> str:
    """Write a key file with one tenant, that has every limit; returns its key."""
    content, key = KeyFile.new().with_key("bench", _DAY)
    limits = Limits(turns=10**6, held_tokens=10**9, conversations=10**6, new_per_minute=10**6)
    keyfile.write(path, content.with_tenant("bench", Tenant(limits)))
    return key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    doors.add_options(parser)
    parser.add_argument("--keys-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.door is not None:
        doors.serve(options.door, Settings(keys_file=options.keys_file))
        return
    folder = doors.new_folder("keys")
    path = folder / "keys.json"
    headers = {"Authorization": f"Bearer {make_keys(path)}"}
    with_keys = Door("keys", 8192, ("--keys-file", str(path)), headers)
    doors.compare("experiments.keys", [Door("no keys", 8191), with_keys], folder, options)


if __name__ == "__main__":
    main()
