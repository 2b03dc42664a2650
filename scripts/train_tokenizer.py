"""Train the embedded model's tokenizer on the standard library's sources.

The shipped ``conserve/embedded/tokenizer.json`` must not change, though the standard library
differs
between Python versions. Run this again only to change it, and train the model after that.

Beside byte-pair merges it has whole pieces of agents' tasks, so that copying a name into a call
takes two tokens. The model's output round-trips: no two of its tokens, one after the other, are cut
differently when they come back as text. Digits are always single.
"""

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.agent import make_session, plain_conversation, transcript
from scripts.embedded.data import EMBEDDED, Renderer

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TARGET = EMBEDDED / "tokenizer.json"
SESSIONS = 1500

# Literal pieces of calls, results and schemas; where two begin alike, the longer goes first.
_PIECES = (
    '\\n<tool_call>\\n\\{"name":',
    '<tool_call>\\n\\{"name":',
    '", "arguments":',
    "\\}\\}\\n</tool_call>",
    '<tool_response>\\n\\{"result":',
    "\\}\\n</tool_response>",
    '\\{"type": "function", "function": \\{"name":',
    '", "description":',
    '", "parameters": \\{"type": "object", "properties":',
    '": \\{"type": "(?:string|integer|boolean)", "description":',
    '"\\}\\}, "required":',
    '"\\},',
    '"\\]\\}\\}\\}',
    '":',
)
# A word takes a space, an underscore, or an opening quote with what stands before it along.
_WORD = r'(?: ?_?| "| \{"| \[")(?:\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|[\p{L}\p{M}]+)'
_DIGIT = " ?[0-9]"
_SIGNS = r' ?[^\s\p{L}\p{N}.,"_]+|[.,"_]'
_SPACE = r"\s+(?!\S)|\s+"
PATTERN = "|".join([*_PIECES, _WORD, _DIGIT, _SIGNS, _SPACE])


def main() -> None:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    pieces = sorted(set(_pieces()))
    size = VOCAB_SIZE
    # Merging finds some of the pieces, too, so the number of merges takes a few tries.
    while True:
        tokenizer = _new()
        _train(tokenizer, sources, size)
        missing = [piece for piece in pieces if tokenizer.token_to_id(piece) is None]
        if size + len(missing) <= VOCAB_SIZE:
            break
        size = VOCAB_SIZE - len(missing)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for piece in missing:
        vocabulary[piece] = len(vocabulary)
    Tokenizer.from_str(json.dumps(state)).save(str(TARGET), pretty=False)
    print(f"{TARGET}: {len(vocabulary)} tokens, {len(missing)} of them whole pieces of tasks")


def _new() -> Tokenizer:
    # With this, a piece in the vocabulary is taken whole, without merges.
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(tokenizer: Tokenizer, sources: list[Path], size: int) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sources], trainer)


def _pieces() -> Iterator[str]:
    """Return what tasks' conversations are cut into, in the vocabulary's spelling."""
    cutter = _new().pre_tokenizer
    renderer = Renderer()
    rng = random.Random(0)
    for number in range(SESSIONS):
        session = make_session(number, "train")
        messages = transcript(session)
        for text in (
            renderer.text(messages, session.schemas),
            renderer.text(plain_conversation(rng), answering=True),
        ):
            for special in SPECIAL_TOKENS:
                text = text.replace(special, "\0")
            for part in text.split("\0"):
                yield from (piece for piece, _ in cutter.pre_tokenize_str(part))


if __name__ == "__main__":
    main()
