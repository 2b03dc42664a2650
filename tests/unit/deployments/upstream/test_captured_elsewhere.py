"""The stream on which vLLM captures CUDA graphs; streams are stand-ins, since there is no GPU."""

from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.utils import torch_utils

from deployments.upstream.captured_elsewhere import capture_where_it_runs


class Stream:
    def __init__(self, device: Any = None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, other: "Stream") -> None: ...


class Group:
    device_communicator = None

    def graph_capture(self, context: Any) -> Any:
        return parallel_state.GroupCoordinator.graph_capture(self, context)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _current())
    for name in ("get_tp_group", "get_pp_group", "get_dp_group"):
        monkeypatch.setattr(parallel_state, name, Group)
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", Stream(), raising=False)


def _current() -> Any:
    return torch_utils._current_stream_tls.value


def test_vllm_captures_on_a_new_stream() -> None:
    with parallel_state.graph_capture(torch.device("cpu")) as context:
        assert context.stream is not _current()


def test_patched_vllm_captures_on_the_stream_that_is_current_then() -> None:
    capture_where_it_runs()
    with parallel_state.graph_capture(torch.device("cpu")) as context:
        assert context.stream is _current()
