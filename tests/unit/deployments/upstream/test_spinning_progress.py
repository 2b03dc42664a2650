"""How long the progress thread of NIXL's agents may sleep."""

from typing import Any

import pytest
from nixl_cu12 import _api as api

from deployments.upstream.spinning_progress import sleep_when_idle


class _Made(Exception):
    """An agent is made, with this delay of its progress thread in us."""


def _delay_us(monkeypatch: pytest.MonkeyPatch) -> int:
    """The delay that the compiled side is given by the Python API."""
    compiled = vars(api.nixlBind.nixlAgentConfig.__mro__[-3])["pthrDelay"]

    def made(name: str, config: Any) -> None:
        raise _Made(compiled.__get__(config))

    monkeypatch.setattr(api.nixlBind, "nixlAgent", made)
    with pytest.raises(_Made) as asked:
        api.nixl_agent("agent", api.nixl_agent_config(backends=["UCX"]))
    return int(asked.value.args[0])


def test_an_agent_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _delay_us(monkeypatch) == 0


def test_a_patched_agent_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_when_idle()
    assert _delay_us(monkeypatch) == 10_000


def test_a_patched_agent_works() -> None:
    sleep_when_idle()
    config = api.nixlBind.nixlAgentConfig()
    config.pthrDelay = 5
    assert config.pthrDelay == 5
    agent = api.nixl_agent("sleeps", api.nixl_agent_config(backends=["UCX"]))
    assert agent.get_agent_metadata()
