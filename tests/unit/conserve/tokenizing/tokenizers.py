"""Tokenizers of the kinds that models come with, small ones."""

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "def main(): return open('file.txt').read()\n\n",
    "The tool said:\n  1234567 tests passed, 3 failed  \n",
    "<|im_start|> is not always <a special> token | end_of_text |>",
    "日本語のテキスト é ﬁn über 12 345",
]
# As Llama 3 and Qwen split text.
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(content: str, **how: bool) -> AddedToken:
    """A token as chat templates use them."""
    return AddedToken(content, special=True, **{"normalized": False, **how})


CHAT = [special("<|im_start|>"), special("<|im_end|>"), special("<|endoftext|>")]


def byte_level(added: list[AddedToken] = CHAT) -> Tokenizer:
    """As GPT, Llama 3, Qwen and DeepSeek have it, normalizing to NFC as Qwen does."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet), added)


def sentence_piece(added: list[AddedToken] = CHAT) -> Tokenizer:
    """As Llama 2 and Mistral have it: only the text's first word gets a space before it."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    return _trained(made, trainer, added)


def prepending(added: list[AddedToken] = CHAT) -> Tokenizer:
    """As Llama 2 has it in older files: each text between special tokens gets a space."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    return _trained(made, trainer, added)


def word_piece(added: list[AddedToken] = CHAT) -> Tokenizer:
    """As BERT has it: lower case, without accents."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>"])
    return _trained(made, trainer, added)


def _trained(made: Tokenizer, trainer: object, added: list[AddedToken]) -> Tokenizer:
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(added)
    return made
