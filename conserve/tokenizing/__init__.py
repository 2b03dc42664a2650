"""Tokenizes prompts, each piece of text once."""

from conserve.tokenizing.cache import Encode, TokenCache
from conserve.tokenizing.pieces import Pieces, SpecialToken, special_tokens

__all__ = ["Encode", "Pieces", "SpecialToken", "TokenCache", "special_tokens"]
