"""What a handoff costs an engine, as tried at its start: whatever else takes the machine."""

from types import SimpleNamespace

import pytest

from conserve.placement import Step
from deployments.engine.reporter import LoadMeter
from deployments.engine.warm_up import forget, try_handoff

TOKENS = 1_500
COMPUTE_S, STORE_S, REQUEST_S = 2.0, 0.3, 0.05


class Engine:
    """Computes when it is asked to, each time in its own time.

    Args:
        slow: how many times as long each request's iterations take, in turn.
        found: whether each load finds the prompt, in turn.
        refusals: how often it refuses to forget.
    """

    def __init__(
        self, slow: list[float], found: list[bool], loads_s: list[float], refusals: int = 0
    ) -> None:
        self.meter = LoadMeter({})
        self.now_s = 0.0
        self._slow, self._found, self._loads_s = iter(slow), iter(found), iter(loads_s)
        self._refusals = refusals
        self.forgets = 0

    async def reset_prefix_cache(self) -> bool:
        self.forgets += 1
        self._refusals -= 1
        return self._refusals < 0

    async def compute(self) -> None:
        self._step(COMPUTE_S * next(self._slow), TOKENS)
        self.now_s += REQUEST_S

    async def store(self) -> None:
        await self.compute()
        self.now_s += STORE_S

    async def load(self) -> None:
        if next(self._found):
            self._step(next(self._loads_s), TOKENS % 128)
        else:
            self._step(COMPUTE_S, TOKENS)

    def _step(self, lasted_s: float, new_tokens: int) -> None:
        self.now_s += lasted_s
        self.meter.took([Step(lasted_s, new_tokens, new_tokens**2)], self.now_s)

    async def tried(self) -> float | None:
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deployments.engine.warm_up.time", clock)
            return await try_handoff(self, self.meter, self.compute, self.store, self.load, TOKENS)


@pytest.mark.parametrize("slow", [[1.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
async def test_what_else_takes_the_machine_is_no_cost_of_handing_over(slow: list[float]) -> None:
    """The same prompt takes 2 s here and 4 s there, or the other way round."""
    engine = Engine(slow, [True] * 3, [0.9, 0.2, 0.5])
    assert await engine.tried() == pytest.approx(STORE_S + 0.2)


async def test_a_load_that_finds_nothing_does_not_count() -> None:
    """Computing all of it again would make handing over look as dear as computing."""
    engine = Engine([1.0, 1.0], [False, True, False], [0.2])
    assert await engine.tried() == pytest.approx(STORE_S + 0.2)
    engine = Engine([1.0, 1.0], [False] * 3, [])
    assert await engine.tried() is None


async def test_a_prompt_is_forgotten_before_it_is_taken_back() -> None:
    """An engine refuses while a request has blocks."""
    engine = Engine([1.0, 1.0], [True] * 3, [0.2] * 3, refusals=2)
    assert await engine.tried() == pytest.approx(STORE_S + 0.2)
    assert engine.forgets == 5
    never = Engine([], [], [], refusals=10_000)
    assert not await forget(never)
    assert await Engine([1.0, 1.0], [], [], refusals=10_000).tried() is None
