"""Tests that other projects have written for servers of these APIs, pointed at the router.

All cases pass but for those that are listed (`vllm.toml`, `openresponses.toml`), each with its
reason; and a case that is listed does not. `make test-compatibility` runs this, not `make test`:
the suites are not in this repository.
"""

import logging
from pathlib import Path

import pytest

from conserve.engines import engine_arguments, engine_environment, model_source
from conserve.launch import Launch
from conserve.settings import EMBEDDED_MODEL
from conserve_lab.peers.plan import server_command
from tests.acceptance.compatibility import openresponses_suite, vllm_suite
from tests.acceptance.compatibility.openresponses_suite import OpenResponsesSuite
from tests.acceptance.compatibility.outcomes import (
    SuiteError,
    kept_by_the_engine,
    read,
    summary,
    surprises,
)
from tests.acceptance.compatibility.vllm_suite import MODEL, VllmSuite
from tests.checkout import ROOT
from tests.engines.applications import COMPATIBLE, COMPATIBLE_ENGINE
from tests.engines.lone import LONE_PORT, wait_for_lone

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(4 * 3600)

_FOLDER = ROOT / "build" / "compatibility"


@pytest.fixture(scope="module")
def vllm(request: pytest.FixtureRequest) -> VllmSuite:
    """vLLM's own tests."""
    return VllmSuite(_FOLDER, request.config.getoption("--vllm"))


@pytest.fixture(scope="module")
def openresponses(request: pytest.FixtureRequest) -> OpenResponsesSuite:
    """Open Responses' compliance tests; skipped where they cannot be had by themselves."""
    checkout = request.config.getoption("--openresponses")
    try:
        return OpenResponsesSuite(_FOLDER, checkout)
    except SuiteError as error:
        if checkout is not None:
            raise
        pytest.skip(str(error))


@pytest.mark.application(COMPATIBLE)
def test_vllm(application: str, vllm: VllmSuite) -> None:
    outcomes = vllm.run(application)
    logger.info("vLLM %s's own tests: %s", vllm_suite.VERSION, summary(outcomes))
    found = surprises(outcomes, read(vllm_suite.LIST))
    assert not found, "\n".join(found)


@pytest.mark.application(COMPATIBLE)
def test_openresponses(application: str, openresponses: OpenResponsesSuite) -> None:
    outcomes = openresponses.run(application, MODEL)
    logger.info("Open Responses' compliance tests: %s", summary(outcomes))
    found = surprises(outcomes, read(openresponses_suite.LIST))
    assert not found, "\n".join(found)


@pytest.mark.usefixtures("machine_alone")
def test_what_is_laid_to_the_engine_fails_on_a_bare_one(
    vllm: VllmSuite, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """No defect of the router is listed as the model's or vLLM's."""
    listed = read(vllm_suite.LIST)
    laid = [case for entry in listed if entry.engine for case in entry.cases]
    with _bare_engine(tmp_path) as engine:
        wait_for_lone(engine, tmp_path)
        url = f"http://127.0.0.1:{LONE_PORT}"
        found = kept_by_the_engine(vllm.run(url, laid), listed)
        assert not found, "\n".join(found)
        # Not before: what was found counts where this suite cannot be had, too.
        outcomes = request.getfixturevalue("openresponses").run(url, MODEL)
        found = kept_by_the_engine(outcomes, read(openresponses_suite.LIST))
        assert not found, "\n".join(found)


def _bare_engine(logs: Path) -> Launch:
    arguments = engine_arguments(EMBEDDED_MODEL, gpu=False) | COMPATIBLE_ENGINE
    command = server_command(model_source(EMBEDDED_MODEL), MODEL, LONE_PORT, arguments)
    environment = engine_environment(EMBEDDED_MODEL, gpu=False)
    # As vLLM's tests start theirs.
    environment["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
    return Launch([], logs / "lone.log", environment, command)
