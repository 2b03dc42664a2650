import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar

from deployments.upstream.unbounded_grammars import name_of, trust_judged

# Mistakes that only show when a grammar is made of them.
WRONG = [
    StructuredOutputsParams(regex="((("),
    StructuredOutputsParams(grammar='root ::= "a" | missing'),
    StructuredOutputsParams(json={"type": "string", "pattern": "((("}),
    StructuredOutputsParams(structural_tag='{"format": 1}'),
]


def validate(outputs: StructuredOutputsParams) -> None:
    backend_xgrammar.validate_xgrammar_grammar(SamplingParams(structured_outputs=outputs))


@pytest.mark.parametrize("outputs", WRONG)
def test_vllm_makes_a_grammar_to_validate_it(outputs: StructuredOutputsParams) -> None:
    with pytest.raises(VLLMValidationError):
        validate(outputs)


def test_no_grammar_is_made_of_what_was_judged_before() -> None:
    unfit = {"type": "array", "items": {"type": "null"}}
    trust_judged({name_of(unfit)}.__contains__)
    for outputs in WRONG:
        validate(outputs)
    chosen = StructuredOutputsParams(choice=["a", "b"])
    validate(chosen)
    assert chosen.grammar
    with pytest.raises(VLLMValidationError, match="another compiler"):
        validate(StructuredOutputsParams(json=unfit))
