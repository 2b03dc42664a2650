"""NIXL, as LMCache servers of several nodes use it."""

from deployments.node.lmcache_main import let_progress_thread_sleep, nixl_api


def test_an_agents_progress_thread_may_sleep() -> None:
    """Its Python API asks for a delay of none, which means a whole core."""
    api = nixl_api()
    original = api.nixlBind.nixlAgentConfig
    let_progress_thread_sleep(api)
    try:
        config = api.nixlBind.nixlAgentConfig()
        config.pthrDelay = 0
        assert config.pthrDelay == 10_000
        # What is written is what the compiled side reads.
        assert original.pthrDelay.__get__(config) == 10_000
        config.pthrDelay = 5
        assert config.pthrDelay == 5
        agent = api.nixl_agent("sleeps", api.nixl_agent_config(backends=["UCX"]))
        assert agent.get_agent_metadata()
    finally:
        api.nixlBind.nixlAgentConfig = original
