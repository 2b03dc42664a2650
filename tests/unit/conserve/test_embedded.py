"""The embedded model as shipped: size, configuration, tokenizer, chat template."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.agent import Message, make_session, transcript
from conserve.embedded import model_path
from scripts.embedded.data import Renderer
from tests.checkout import ROOT

MAX_BYTES = 16_000_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_path(tmp_path_factory.mktemp("home"))


TOKENIZER = Tokenizer.from_file(str(ROOT / "conserve" / "embedded" / "tokenizer.json"))


def test_it_is_made_once(tmp_path: Path) -> None:
    first = model_path(tmp_path)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert model_path(tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_the_weights_are_what_the_configuration_says(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["max_position_embeddings"] >= 16_384
    assert config["vocab_size"] == TOKENIZER.get_vocab_size()
    hidden, head = config["hidden_size"], config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [config["vocab_size"], hidden],
    }
    for layer in range(config["num_hidden_layers"]):
        queries = config["num_attention_heads"] * head
        keys = config["num_key_value_heads"] * head
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [hidden],
                "post_attention_layernorm": [hidden],
                "self_attn.q_norm": [head],
                "self_attn.k_norm": [head],
                "self_attn.q_proj": [queries, hidden],
                "self_attn.k_proj": [keys, hidden],
                "self_attn.v_proj": [keys, hidden],
                "self_attn.o_proj": [hidden, queries],
                "mlp.gate_proj": [config["intermediate_size"], hidden],
                "mlp.up_proj": [config["intermediate_size"], hidden],
                "mlp.down_proj": [hidden, config["intermediate_size"]],
            }.items()
        }
    file = directory / "model.safetensors"
    assert file.stat().st_size < MAX_BYTES
    with safe_open(file, "numpy") as weights:
        found = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        assert {name: part.get_shape() for name, part in found.items()} == shapes
        assert {part.get_dtype() for part in found.values()} == {"BF16"}


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_what_the_model_says_is_cut_as_it_was_said() -> None:
    """Any sequence of tokens from right answers becomes the same tokens again."""
    said: set[int] = set()
    for seed in range(120):
        for message in transcript(make_session(seed, "held-out", schema_tokens=(50, 60))):
            if message["role"] == "assistant":
                said |= set(TOKENIZER.encode(_spoken(message), add_special_tokens=False).ids)
    assert len(said) > 250
    rng = random.Random(1)
    for _ in range(300):
        ids = rng.choices(sorted(said), k=40)
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        assert TOKENIZER.encode(text, add_special_tokens=False).ids == ids


def _spoken(message: Message) -> str:
    """An assistant's message in the Hermes format."""
    calls = ""
    for call in message.get("tool_calls", []):
        function = call["function"]
        body = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
        calls += f"<tool_call>\n{body}\n</tool_call>"
    return str(message["content"]) + calls


@pytest.mark.parametrize("remark", ["", "First.", "First.\n"])
def test_the_template_puts_calls_on_lines_of_their_own(directory: Path, remark: str) -> None:
    """A history has the same text whether or not a client keeps the line break."""
    call = {"name": "add", "arguments": {"a": 1, "b": "x"}}
    function = {"type": "function", "function": call}
    text = Renderer(directory).text(
        [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": remark, "tool_calls": [function, function]},
        ]
    )
    line = "First.\n" if remark else ""
    one = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    assert text.endswith(f"<|im_start|>assistant\n{line}{one}\n{one}<|im_end|>\n")
