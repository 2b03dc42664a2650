"""The embedded models as shipped: size, configuration, tokenizer, chat template, what they see."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoProcessor, Idefics3ForConditionalGeneration

from conserve.embedded import MODEL_NAME, VISION_MODEL_NAME, model_path
from conserve_lab.agent import Call, Message, make_session, transcript
from conserve_lab.agent.screens import CLICK, Walk
from conserve_lab.agent.tasks import call_message
from scripts.embedded.data import Renderer
from scripts.seeing.data import Maker, pixels
from tests.checkout import ROOT

MAX_BYTES = 16_000_000
MAX_VISION_BYTES = 8_000_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_path(tmp_path_factory.mktemp("home"))


TOKENIZER = Tokenizer.from_file(str(ROOT / "conserve" / "embedded" / "tokenizer.json"))


@pytest.mark.parametrize("name", [MODEL_NAME, VISION_MODEL_NAME])
def test_it_is_made_once(tmp_path: Path, name: str) -> None:
    first = model_path(tmp_path, name)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert model_path(tmp_path, name) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_the_weights_are_small_and_of_the_tokenizers_vocabulary(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    assert config["max_position_embeddings"] >= 16_384
    assert config["vocab_size"] == TOKENIZER.get_vocab_size()
    file = directory / "model.safetensors"
    assert file.stat().st_size < MAX_BYTES
    with safe_open(file, "numpy") as weights:
        found = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
    embeddings = [config["vocab_size"], config["hidden_size"]]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].get_shape() == embeddings
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


def test_the_one_that_sees_clicks_what_is_highlighted_on_the_newest_screen(tmp_path: Path) -> None:
    """Transformers reads the same files as vLLM: processor, template and weights."""
    folder = model_path(tmp_path, VISION_MODEL_NAME)
    assert (folder / "model.safetensors").stat().st_size < MAX_VISION_BYTES
    processor = AutoProcessor.from_pretrained(folder)
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    hits = []
    for seed in range(4):
        walk = Walk.draw(f"unit/{seed}", "held-out", 2)
        messages = walk.messages()
        messages[1]["content"][1] = {"type": "image"}
        for number, screen in enumerate(walk.screens[:-1]):
            text = processor.apply_chat_template(
                messages, tools=[CLICK], add_generation_prompt=True
            )
            pictures = [one.picture() for one in walk.screens[: number + 1]]
            given = processor(text=text, images=pictures, return_tensors="pt")
            # Training has shown it the same.
            ids = given["input_ids"][0].tolist()
            assert Maker(folder).walked(walk).ids[: len(ids)] == ids
            seen = pixels(walk.screens[: number + 1])
            assert torch.allclose(given["pixel_values"][0], seen, atol=2 / 127)
            said = model.generate(**given, max_new_tokens=40, do_sample=False)[0, len(ids) :]
            answer = processor.decode(said)
            assert answer.startswith(f"{walk.remark(number)}\n<tool_call>\n"), answer
            called = json.loads(answer.partition("<tool_call>")[2].partition("</tool_call>")[0])
            hits.append(screen.hit(Call(called["name"], called["arguments"])))
            right = screen.target()
            assert right is not None
            messages.append(call_message(right, walk.remark(number), "c"))
            messages.append({"role": "tool", "tool_call_id": "c", "content": [{"type": "image"}]})
    assert sum(hits) >= 7
