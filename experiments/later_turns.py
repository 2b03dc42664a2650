"""Measures what later turns save by not asking the table.

One application (one prefiller, one decoder), and before it two routers that differ in nothing but
their memory: one has every turn placed by the table, which hears of its begin and end; the other
sends later turns straight to their decoder. They are measured in turn, as `experiments/warm.py`
says.
"""

from collections.abc import Sequence
from functools import partial

from conserve.direct import Homes
from conserve.settings import Settings
from deployments.router.frontdoor import FrontDoor
from experiments import doors, warm
from experiments.doors import Door


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = warm.experiment("later_turns", __doc__)
    experiment.hidden("--door", type=int)
    experiment.hidden("--forgets", action="store_true")
    options = experiment.parse(arguments)
    if options.door is not None:
        homes = Homes(0 if options.forgets else 1000)
        doors.serve(options.door, Settings(), partial(FrontDoor, homes=homes))
        return
    both = [Door("asks the table", ("--forgets",)), Door("asks nobody")]
    with doors.opened(experiment, both) as urls:
        warm.compare(experiment, [warm.System(name, url) for name, url in urls.items()])


if __name__ == "__main__":
    main()
