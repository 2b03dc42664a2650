"""A logits processor of vLLM by which engines say what `scripts` has them say.

Engines load it by its class path; what it uses is vLLM's public interface for such processors.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logits_process import LogitsProcessor as RequestLogitsProcessor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.acceptance.clients.tokens import ForcedTokens


class ForcedAnswers(AdapterLogitsProcessor):
    """Leaves of each chat's logits the one token that its script says next."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        folder = Path(vllm_config.model_config.tokenizer)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def is_argmax_invariant(self) -> bool:
        """It is not: it chooses the token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
        """One request's processor."""
        forced: ForcedTokens | None = None

        def force(
            prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
        ) -> torch.Tensor:
            nonlocal forced
            if forced is None:
                forced = ForcedTokens(self._tokenizer, prompt_ids)
            token = forced.at(len(output_ids))
            if token is not None:
                logits.fill_(float("-inf"))
                logits[token] = 0.0
            return logits

        return force
