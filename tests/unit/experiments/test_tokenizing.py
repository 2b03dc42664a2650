"""What tokenizing what is new saves: both ways have the same tokens, and that is looked at."""

import pytest
from transformers import AutoTokenizer

from conserve.embedded import model_path
from conserve.tokenizing import TokenCache
from experiments import tokenizing


def test_a_later_turn_is_measured_in_both_ways() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
    found = tokenizing.measure(tokenizer, tokenizing.Chats(0), 30_000, rounds=1)
    assert found["tokens"] > 10_000
    assert found["pieces"] > 3
    assert min(found[name] for name in ("rendered", "whole", "first", "next")) > 0


def test_other_tokens_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TokenCache.tokens
    monkeypatch.setattr(TokenCache, "tokens", lambda *given: tokens(*given)[1:])
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))
    with pytest.raises(RuntimeError, match="tokens of the whole"):
        tokenizing.measure(tokenizer, tokenizing.Chats(0), 10_000, rounds=1)
