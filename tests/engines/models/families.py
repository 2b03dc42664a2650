"""Models of random weights, one of each family: its classes, its tokens, its way of tool calls.

Made in seconds, on the embedded model's tokenizer with a family's own tokens added. What they say
means nothing; that vLLM starts them, with the parsers that ConServe chooses by their files, and
takes their clients' tools, does.
"""

from collections.abc import Mapping
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
_CLOSED = "<think></think>"
# As Qwen 3 has it, and GLM: a model reasons unless it is asked not to.
_ASKED_NOT_TO = (
    "{% if enable_thinking is defined and not enable_thinking %}" + _CLOSED + "{% endif %}"
)
_XML = "<tool_call><function=name><parameter=key>value</parameter></function></tool_call>"


def _wide(text: str) -> str:
    """With DeepSeek's bars, which are full-width."""
    return text.replace("|", "\uff5c")


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        kind: transformers' name for its configuration.
        call: how it calls a tool, as far as its template shows that.
        tool: the parser that is expected for it, and `reasoning`.
        tokens: what its vocabulary has beside the embedded model's.
        end: what its template has at the end of the prompt for an answer.
        forced: whether vLLM has it call a tool when one is required; else its parser reads the
            call in whatever a model of random weights says.
        sizes: what its configuration says beside the usual sizes.
    """

    kind: str
    call: str
    tool: str
    reasoning: str | None = None
    tokens: tuple[str, ...] = ()
    end: str = ""
    forced: bool = True
    sizes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def make(self, folder: Path) -> None:
        """Make the model there, always the same."""
        import torch
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(model_path() / "tokenizer.json"),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )
        tokenizer.add_tokens(list(self.tokens), special_tokens=False)
        tokenizer.chat_template = _TEMPLATE % (self.call, self.end)
        config = CONFIG_MAPPING[self.kind](
            **_SIZES | dict(self.sizes),
            # Some backends of vLLM's want a whole number of 64.
            vocab_size=-(-len(tokenizer) // 64) * 64,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


_THINK = ("<think>", "</think>")
FAMILIES = {
    "qwen3": Family(
        "qwen3", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes", "qwen3",
        (*_THINK, "<tool_call>", "</tool_call>"), _ASKED_NOT_TO,
    ),
    "qwen3-coder": Family(
        "qwen3_moe", _XML, "qwen3_coder", None, ("<tool_call>", "</tool_call>"), sizes=_EXPERTS
    ),
    "llama3": Family(
        "llama", '{"name": function name, "parameters": dictionary of argument name and its value}',
        "llama3_json", None, ("<|python_tag|>",), forced=False,
    ),
    "mistral": Family(
        "mistral", "[TOOL_CALLS][]", "mistral", None, ("[TOOL_CALLS]",), forced=False
    ),
    "deepseek-v3": Family(
        "deepseek_v3", _wide("<|tool▁calls▁begin|>function<|tool▁sep|>name\n```json\n{}\n```"),
        "deepseek_v3", None,
        tuple(_wide(f"<|{name}|>") for name in (
            "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")),
        sizes=_EXPERTS | {
            "num_key_value_heads": 2, "q_lora_rank": None, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        },
    ),
    "glm4-moe": Family(
        "glm4_moe", "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>",
        "glm47", "glm47",
        (*_THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
         "</arg_value>"),
        _ASKED_NOT_TO, sizes=_EXPERTS | {"n_group": 1, "topk_group": 1},
    ),
    # MiniMax M2 is not here: vLLM 0.29 corrupts its own memory with it on CPUs.
    "granite": Family("granite", "<|tool_call|>[]", "granite", None, ("<|tool_call|>",)),
    "seed-oss": Family(
        "seed_oss", "<seed:tool_call><function=f></function></seed:tool_call> <seed:think>",
        "seed_oss", "seed_oss",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"), forced=False,
    ),
    "phi4-mini": Family("phi3", 'functools[{"name": "f", "arguments": {}}]', "phi4_mini_json"),
    "gemma3": Family(
        "gemma3_text", "[func_name1(params_name1=params_value1)]", "pythonic",
        sizes={"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 64},
    ),
}  # fmt: skip
