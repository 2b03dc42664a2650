"""Start ConServe, and show how long each engine's check of its caches took, and what it found."""

import httpx

from experiments.harness import Experiment


def main() -> None:
    experiment = Experiment("start", __doc__)
    experiment.parse()
    with experiment.serving() as url:
        engines = httpx.get(f"{url}/v1/engines", timeout=30).json()["data"]
    rows = [(one["role"], *map(str, one["cache_check"].values())) for one in engines]
    experiment.show("the check of caches", ("role", *engines[0]["cache_check"]), rows)


if __name__ == "__main__":
    main()
