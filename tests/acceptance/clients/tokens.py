"""The tokens that an engine is made to say."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from tests.acceptance.clients.scripts import answer_to

# Where the chat template has an answer begin, and how the model ends it.
_BEGIN = "<|im_start|>assistant\n"
_END = "<|im_end|>"


class ForcedTokens:
    """The tokens of one answer.

    Args:
        tokenizer: the embedded model's.
        prompt_ids: what is answered; the answer's beginning may follow it, as it does where a
            stream is continued at another engine.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        begin: list[int] = tokenizer.encode(_BEGIN).ids
        end = _last(begin, prompt_ids)
        self._ids: list[int] | None = None
        if end is None:
            # No chat: nothing is forced.
            return
        prompt = tokenizer.decode(list(prompt_ids[:end]), skip_special_tokens=False)
        # As the next turn's prompt has it, or its KV would not be found.
        whole: list[int] = tokenizer.encode(_BEGIN + answer_to(prompt) + _END).ids
        if whole[: len(begin)] != begin:
            raise ValueError(f"{_BEGIN!r} and the answer to {prompt[-200:]!r} are cut as one")
        self._ids = whole[len(begin) :]
        self._said = len(prompt_ids) - end

    def at(self, outputs: int) -> int | None:
        """The token that comes after so many, or None where the model speaks for itself."""
        if self._ids is None:
            return None
        return self._ids[min(self._said + outputs, len(self._ids) - 1)]


def _last(part: Sequence[int], ids: Sequence[int]) -> int | None:
    """Where the last occurrence of a part ends."""
    for end in range(len(ids), len(part) - 1, -1):
        if list(ids[end - len(part) : end]) == list(part):
            return end
    return None
