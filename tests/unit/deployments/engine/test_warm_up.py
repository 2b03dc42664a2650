"""What a handoff costs an engine, as tried at its start: whatever else takes the machine."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.placement import Step
from conserve.wire import CHUNK_TOKENS
from deployments.engine.reporter import LoadMeter
from deployments.engine.warm_up import WarmUp, forget, prompt_tokens, try_handoff
from deployments.messages import EngineInfo

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


# --- the check of the cache -----------------------------------------------------------------------


def test_a_prompt_has_units_of_which_something_should_be_found() -> None:
    lengths = {
        392: (128, 128, 16_384), 776: (16, 256, 8_192), 2_360: (784, 0, 8_192),
        # Fewer units fit, or LMCache's chunks do not.
        1_576: (784, 784, 2_000), 4_104: (4_096, 0, 8_192), 56: (16, 256, 200),
    }  # fmt: skip
    assert [prompt_tokens(*given) for given in lengths.values()] == list(lengths)
    assert prompt_tokens(2_048, 2_048, 2_048) == prompt_tokens(16, 0, 5) == 0


class Tried(WarmUp):
    """An engine without HTTP; its cache and host memory have these tokens of each prompt."""

    def __init__(self, *found: tuple[int, int] | Exception, unit: int = 128, stores: bool = True):
        some, extra = SimpleNamespace, {CHUNK_TOKENS: 128}
        config = some(
            cache_config=some(block_size=unit, mamba_block_size=None),
            kv_transfer_config=some(is_kv_producer=stores, kv_connector_extra_config=extra),
            model_config=some(get_vocab_size=lambda: 1_000),
        )
        client = some(vllm_config=config, reset_prefix_cache=self._forgets)
        info = EngineInfo("d#1", "decoder", "http://d", 1, 100_000, 2_944)
        super().__init__(client, LoadMeter({}), info, "model")
        self.found, self.lengths, self.forgot = list(found), list[int](), 0

    async def _forgets(self) -> bool:
        self.forgot += 1
        return True

    async def _found(self, session: Any, ids: list[int]) -> tuple[int, int]:
        self.lengths.append(len(ids))
        if isinstance(found := self.found.pop(0), Exception):
            raise found
        return found


NOTHING, ALL, LOADED = (0, 0), (384, 0), (0, 384)


@pytest.mark.parametrize(
    ("engine", "found", "problem"),
    [
        (Tried(NOTHING, ALL, ALL, LOADED), (384, 384, 384), ""),
        # What was stored is found some milliseconds later.
        (Tried(NOTHING, ALL, ALL, NOTHING, LOADED), (384, 384, 384), ""),
        (Tried(NOTHING, ALL, ALL, stores=False), (384, 384, None), ""),
        (Tried(NOTHING, LOADED, LOADED, LOADED), (0, 0, 384), "comes again, or with more behind"),
        (Tried(NOTHING, ALL, NOTHING, LOADED), (384, 0, 384), "so engines compute whole conv"),
        (Tried(NOTHING, ALL, ALL, *[NOTHING] * 3), (384, 384, 0), "host memory .*lmcache.size_gb"),
        (Tried(unit=4_096), (0, 0, None), "up to 2,944 tokens, .* engine.block_size than 4,096"),
        (Tried(RuntimeError("no")), (0, 0, None), r"could not be checked: RuntimeError\('no'\)"),
        (Tried(NOTHING, TimeoutError()), (0, 0, None), r"could not be checked: TimeoutError\(\)"),
    ],
)
async def test_an_engine_says_what_its_caches_find(
    caplog: pytest.LogCaptureFixture, engine: Tried, found: tuple[Any, ...], problem: str
) -> None:
    with caplog.at_level(logging.INFO, "ray.serve"):
        check = await engine._check_cache(None)  # type: ignore[arg-type]
    assert (check.again_tokens, check.appended_tokens, check.host_tokens) == found
    assert not engine.found
    assert engine.lengths[:4] == [392, 392, 400, 392][: len(engine.lengths)]
    assert engine.forgot == len(engine.lengths[3:])
    assert bool(check.problem) == bool(problem)
    assert re.search(problem, check.problem)
    (said,) = caplog.records
    assert said.levelname == ("WARNING" if problem else "INFO")
    host = "" if found[2] is None else f" ({found[2]} in host memory)"
    assert said.getMessage() == (
        f"decoder d#1 found {found[0]} of {check.sent_tokens} tokens{host}; this model's cache "
        f"works in units of {check.unit_tokens:,} tokens" + (problem and f": {check.problem}")
    )
