"""Results of a request's choices, as vLLM passes them on."""

import itertools
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from conserve import wire

KINDS = (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
LOADED = {"cached_token_stats": {"num_vllm_cached_tokens": 0, "num_lmcache_extra_cached_tokens": 9}}
FOUND = {"cached_token_stats": {"num_vllm_cached_tokens": 9, "num_lmcache_extra_cached_tokens": 0}}


def asked(name: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        name, [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r"
    )


def choices(kind: RequestOutputKind) -> tuple[OutputProcessor, RequestOutputCollector, list[str]]:
    """A processor with a request of two choices, its queue, and the choices' ids."""
    parent = ParentRequest(asked("r", SamplingParams(n=2, output_kind=kind, detokenize=False)))
    processor, queue = OutputProcessor(None, log_stats=False), RequestOutputCollector(kind, "r")
    ids = []
    for index in range(2):
        id_, own = parent.get_child_info(index)
        ids.append(id_)
        processor.add_request(asked(id_, own), None, parent, index, queue)
    return processor, queue, ids


def answered(order: tuple[int, ...], kind: RequestOutputKind) -> tuple[int | None, wire.Encoded]:
    """Return the tokens loaded and the images encoded, by the last output.

    Args:
        order: of two choices' ends; the first of them has loaded the prompt.
    """
    processor, queue, ids = choices(kind)

    def put(index: int, finish: FinishReason | None, **told: Any) -> None:
        out = EngineCoreOutput(ids[index], [7], finish_reason=finish, **told)
        processor.process_outputs([out])

    first, last = order
    both = (LOADED, {wire.ENCODED: [1, 16, 0]}), (FOUND, {wire.ENCODED: [0, 0, 1]})
    put(first, None)
    put(last, None)
    for choice, other in ((first, last), (last, None)):
        kv, ec = both[choice]
        put(choice, FinishReason.LENGTH, kv_transfer_params=kv, ec_transfer_params=ec)
        if other is not None:
            # Its tokens follow before anything was read.
            put(other, None)
    output = queue.get_nowait()
    assert output is not None
    loaded = wire.cached_tokens(output.kv_transfer_params).lmcache_tokens
    return loaded, wire.encoded(output.ec_transfer_params)


def test_vllm_tells_what_its_last_choice_found() -> None:
    for kind in KINDS:
        assert answered((0, 1), kind) == (0, wire.Encoded(0, 0, 1))


@pytest.mark.usefixtures("patched")
def test_one_that_is_aborted_ends_all_of_its_choices() -> None:
    processor, queue, ids = choices(RequestOutputKind.DELTA)
    assert sorted(processor.abort_requests(["r"], internal=False)) == sorted(ids)
    output = queue.get_nowait()
    assert output is not None
    assert {one.finish_reason for one in output.outputs} == {"abort"}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("order", "kind"), [*itertools.product([(0, 1), (1, 0)], KINDS)])
def test_what_one_choice_loaded_is_told_whichever_comes_last(
    order: tuple[int, int], kind: RequestOutputKind
) -> None:
    assert answered(order, kind) == (9, wire.Encoded(1, 16, 1))
