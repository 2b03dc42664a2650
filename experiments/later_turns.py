"""Measures what it saves that later turns ask nobody: routers that remember histories or do not.

    python -m experiments.later_turns [--rounds 40] [--hogs 0 2] [--json PATH]

One application (one prefiller, one decoder), and before it two routers that differ in nothing but
their memory: one has every turn placed by the table, which hears of its begin and end; the other
sends later turns straight to their decoder. They are measured in turn, as
`experiments.warm` says.
"""

import argparse
from functools import partial

from conserve.direct import Homes
from conserve.settings import Settings
from deployments.router.frontdoor import FrontDoor
from experiments import doors
from experiments.doors import Door


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    doors.add_options(parser)
    parser.add_argument("--forgets", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.door is not None:
        homes = Homes(0 if options.forgets else 1000)
        doors.serve(options.door, Settings(), partial(FrontDoor, homes=homes))
        return
    asks = Door("asks the table", 8191, ("--forgets",))
    doors.compare(
        "experiments.later_turns",
        [asks, Door("asks nobody", 8192)],
        doors.new_folder("later-turns"),
        options,
    )


if __name__ == "__main__":
    main()
