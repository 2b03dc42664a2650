"""Models of random weights, one of each family: its classes, its tokens, its way of tool calls.

Made in seconds, on the embedded model's tokenizer with a family's own tokens added. What they say
means nothing; that vLLM starts them, with the parsers that ConServe chooses by their files, and
takes their clients' tools, does.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conserve.embedded import model_path

_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 128}  # fmt: skip
# A template of each family's kind: tools in the system's prompt, and how they are to be called.
_TEMPLATE = (
    "{%% if tools %%}<|im_start|>system\n{%% for tool in tools %%}{{ tool | tojson }}\n"
    "{%% endfor %%}Call one so: %s<|im_end|>\n{%% endif %%}"
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%% for call in m.tool_calls or [] %%}{{ call.function | tojson }}{%% endfor %%}"
    "<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n%s{%% endif %%}"
)
# As Qwen 3 has it, and GLM: a model reasons unless it is asked not to.
_ENDS = {
    "asked-not-to": "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}"
}
# A configuration that comes with its model, since transformers and vLLM have no class for it.
_CONFIGURATION = """from transformers import PreTrainedConfig
class Configuration(PreTrainedConfig):
    model_type = {kind!r}
"""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        kind: the name of its configuration.
        call: how it calls a tool, as far as its template shows that.
        tool: the parser that is expected for it, and `reasoning`.
        architecture: vLLM's class for it where transformers has none: then its configuration is
            all there is, and vLLM makes the weights.
        tokens: what its vocabulary has beside the embedded model's.
        end: what its template has at the end of the prompt for an answer.
        forced: whether vLLM has it call a tool when one is required; else its parser reads the
            call in whatever a model of random weights says.
        experts: whether it has some.
        torchvision: whether vLLM imports torchvision for it, as it sees in another form.
        sizes: what its configuration says beside the usual sizes.
    """

    kind: str
    call: str
    tool: str
    reasoning: str | None = None
    architecture: str | None = None
    tokens: Sequence[str] = ()
    end: str = ""
    forced: bool = True
    experts: bool = False
    torchvision: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> Any:
        """Return its tokenizer, with its template."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(model_path() / "tokenizer.json"),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )
        tokenizer.add_tokens(list(self.tokens), special_tokens=False)
        tokenizer.chat_template = _TEMPLATE % (self.call, _ENDS.get(self.end, self.end))
        return tokenizer

    def make(self, folder: Path) -> list[str]:
        """Make the model there, always the same; return the settings that serve it."""
        import torch
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        tokenizer = self.tokenizer()
        said = {
            **_SIZES,
            **(_EXPERTS if self.experts else {}),
            # Some backends of vLLM's want a whole number of 64.
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "dtype": "bfloat16",
            **self.sizes,
        }
        tokenizer.save_pretrained(folder)
        if self.architecture is None:
            torch.manual_seed(0)
            config = CONFIG_MAPPING[self.kind](**said)
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            model.config.architectures = [type(model).__name__]
            model.save_pretrained(folder)
            return []
        said |= {"model_type": self.kind, "architectures": [self.architecture]}
        if self.kind not in CONFIG_MAPPING:
            said["auto_map"] = {"AutoConfig": "configuration.Configuration"}
        (folder / "configuration.py").write_text(_CONFIGURATION.format(kind=self.kind))
        (folder / "config.json").write_text(json.dumps(said))
        return ["engine.load_format=dummy", "engine.trust_remote_code=true"]


_LISTED = tomllib.loads((Path(__file__).parent / "families.toml").read_text())
FAMILIES = {name: Family(**said) for name, said in _LISTED.items()}
