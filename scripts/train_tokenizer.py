"""Train the embedded model's tokenizer on the standard library's sources.

Its product, ``conserve/embedded/tokenizer.json``, is shipped: the standard library differs
between Python versions, and a model's tokenizer must not. Run again only to change it.
"""

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TARGET = Path(__file__).resolve().parents[1] / "conserve" / "embedded" / "tokenizer.json"


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train([str(path) for path in sources], trainer)
    tokenizer.save(str(TARGET), pretty=False)
    print(f"{TARGET}: {tokenizer.get_vocab_size()} tokens from {len(sources)} files")


if __name__ == "__main__":
    main()
