"""Chooses vLLM's parsers of a model's tool calls and reasoning.

vLLM chooses none by itself: without one it refuses ``tools``, and leaves reasoning in the answer. A
model's chat template shows how it writes calls. If that shows none, or there is none, the
architecture decides.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from conserve.engines import engine_arguments
from conserve.settings import Settings

# vLLM's names for what is chosen here.
TOOL_CALL_PARSER = "tool_call_parser"
REASONING_PARSER = "reasoning_parser"
AUTO_TOOL_CHOICE = "enable_auto_tool_choice"

# Whether a model reasons before it answers: unless asked not to, only if asked to, or not known.
Thinking = Literal["on", "off", "unsaid"]


@dataclass(frozen=True, slots=True)
class Prompting:
    """Knowledge of how a model is prompted.

    Attributes:
        template: its chat template for requests with tools; None if vLLM renders its prompts by its
            own code, or it has none.
        thinking: what the end of a prompt for the next answer says.
        tokens, packages: which of those that parsers require it has; None if not known.
    """

    architectures: tuple[str, ...]
    template: str | None = None
    shows_tools: bool = True
    thinking: Thinking = "unsaid"
    tokens: Set[str] | None = None
    packages: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Parsers:
    """vLLM's parsers for a model; without a tool parser, tools are refused.

    ``problem`` tells an operator what to do.
    """

    tool: str | None = None
    reasoning: str | None = None
    why: str = ""
    problem: str | None = None

    def arguments(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        if self.tool is not None:
            chosen |= {AUTO_TOOL_CHOICE: True, TOOL_CALL_PARSER: self.tool}
        if self.reasoning is not None:
            chosen[REASONING_PARSER] = self.reasoning
        return chosen


@dataclass(frozen=True, slots=True)
class Format:
    """A way in which models write tool calls, and the parsers that read it.

    Attributes:
        tool: vLLM's parser of the calls, if it has one.
        marks: the template of a model that writes so has all of them; empty if it shows no calls.
        reasoning: the parser for models that reason unless they are asked not to. It takes an
            answer for reasoning until that ends, so other models must not have it.
        on_request: the parser for models that reason only if they are asked to.
        sign: a text of the template that shows that the model reasons; empty if all of these models
            do. None if the end of a prompt says it.
    """

    tool: str | None
    marks: tuple[str, ...] = ()
    reasoning: str | None = None
    on_request: str | None = None
    sign: str | None = None


def deepseek(name: str) -> str:
    """Return a token of DeepSeek's, whose bars are full-width."""
    return f"<\uff5c{name}\uff5c>"


_DEEPSEEK_CALLS = deepseek("tool▁calls▁begin")
_DSML = deepseek("DSML").removesuffix(">")
_HERMES = Format("hermes", ("<tool_call>",))
_QWEN_CODER = Format("qwen3_coder", ("<tool_call>", "<function="))
_DEEPSEEK_V3 = Format("deepseek_v3", (_DEEPSEEK_CALLS, "```json"), "deepseek_r1", "deepseek_v3")
_DEEPSEEK_V31 = Format("deepseek_v31", (_DEEPSEEK_CALLS,), "deepseek_r1", "deepseek_v3")
_DEEPSEEK_V32 = Format("deepseek_v32", (_DSML,), "deepseek_v3", sign="")
_KIMI_K2 = Format("kimi_k2", ("<|tool_calls_section_begin|>",), "kimi_k2", sign="<think>")
_MINIMAX_M2 = Format("minimax_m2", ("<minimax:tool_call>",), "minimax_m2")
_MINIMAX_M3 = Format("minimax_m3", ("]<]minimax[>[",), "minimax_m3", sign="<mm:think>")
_MISTRAL = Format("mistral", ("[TOOL_CALLS]",), "mistral", sign="[THINK]")
_GPT_OSS = Format("openai", ("<|channel|>", "<|call|>"), "openai_gptoss", sign="")
_GLM = Format("glm47", ("<tool_call>", "<arg_key>"), "glm47")
_LLAMA_JSON = Format("llama3_json", ("dictionary of argument name",))
_GEMMA4 = Format("gemma4", ("<|tool_call>", "<tool_call|>"), "gemma4", sign="<|channel>")
_GRANITE = Format("granite", ("<|tool_call|>",), "granite", sign="Here is my thought process")
_SEED = Format("seed_oss", ("<seed:tool_call>",), "seed_oss", sign="<seed:think>")
_LFM2 = Format("lfm2", ("<|tool_call_start|>",))
_OLMO3 = Format("olmo3", ("<function_calls>",), "olmo3")
_PHI4 = Format("phi4_mini_json", ("functools[",))
_COHERE = Format("cohere_command3", ("<|START_ACTION|>",), "cohere_command3", sign="")
_PYTHONIC = Format("pythonic", ("func_name1(",))
_LONGCAT = Format("longcat", ("<longcat_tool_call>",))
_APERTUS = Format("apertus", ("<|tools_prefix|>",))
_DOTS = Format("dots", ("<dots_function_call>",))
_INTERNLM = Format("internlm", ("<|action_start|>",))
_STEP3 = Format("step3", ("<steptml:invoke",), "step3", sign="")
_MUSE = Format("muse_glimmer", ("<atem:invoke",), "muse_glimmer", sign="")
_GIGACHAT3 = Format("gigachat3", ("<|role_sep|>", "function call"))
_MINICPM5 = Format("minicpm5", ("<function name=",))
_HUNYUAN = Format("hunyuan_a13b", ("<tool_calls>",), "hunyuan_a13b", sign="<think>")
_PLAMO3 = Format("plamo3", ("<|plamo:begin_tool_request",), "plamo3", sign="<|plamo:begin_think")
_K2_HORIZON = Format("k2_horizon", ("<ifm|tool_call",), "k2_horizon", sign="<ifm|think")
# The model's own suffix comes before the bracket.
_HY_MARKS = ("<tool_calls", "<tool_call", "<arg_key")

# Told apart by their marks; of two with as many in one template, the earlier counts.
FORMATS = (
    _KIMI_K2, _MINIMAX_M2, _MINIMAX_M3, _DEEPSEEK_V32, _DEEPSEEK_V3, _DEEPSEEK_V31, _SEED,
    _LONGCAT, _DOTS, _GEMMA4, _LFM2, _APERTUS, _INTERNLM, _STEP3, _MUSE, _MISTRAL, _GPT_OSS,
    _COHERE, _GRANITE, _GIGACHAT3, _PHI4, _OLMO3, _MINICPM5, _GLM, _QWEN_CODER, _HUNYUAN, _HERMES,
    _PLAMO3, _K2_HORIZON,
    Format("functiongemma", ("<start_function_call>",)),
    Format("gigachat3", ("<|function_call|>",)),
    # Nemotron's second generation, whose parser comes with the model, as a plugin.
    Format(None, ("<TOOLCALL>",)),
    _LLAMA_JSON, _PYTHONIC,
    Format("llama3_json", ("<|python_tag|>",)),
)  # fmt: skip


def _of(names: str, *of: Format) -> dict[str, tuple[Format, ...]]:
    return dict.fromkeys(names.split(), of)


# By architecture, for templates without marks, or with marks of several formats. A template without
# marks is taken for the first of them.
ARCHITECTURES: dict[str, tuple[Format, ...]] = {
    **_of("Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration"
          " Qwen2_5_VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration"
          " Qwen2_5OmniModel MellumForCausalLM MiMoForCausalLM", _HERMES),
    **_of("Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM"
          " Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration"
          " Qwen3OmniMoeForConditionalGeneration", replace(_HERMES, reasoning="qwen3")),
    **_of("Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration"
          " Qwen3_5MoeForConditionalGeneration Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration"
          " InternS2PreviewForConditionalGeneration", replace(_QWEN_CODER, reasoning="qwen3")),
    **_of("MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration",
          replace(_QWEN_CODER, reasoning="minicpmv")),
    **_of("AfmoeForCausalLM", _QWEN_CODER),
    **_of("NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3"
          " NemotronH_Super_Omni_Reasoning_V3 NemotronH_Omni_Reasoning_V3",
          replace(_QWEN_CODER, reasoning="nemotron_v3")),
    **_of("MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiMoV2OmniForCausalLM",
          replace(_QWEN_CODER, tool="mimo", reasoning="mimo")),
    **_of("Step3p5ForCausalLM Step3p7ForConditionalGeneration",
          replace(_QWEN_CODER, tool="step3p5", reasoning="step3p5")),
    **_of("Step3TextForCausalLM Step3VLForConditionalGeneration", _STEP3),
    **_of("LlamaForCausalLM MllamaForConditionalGeneration", _LLAMA_JSON),
    **_of("Llama4ForCausalLM Llama4ForConditionalGeneration",
          replace(_PYTHONIC, tool="llama4_pythonic")),
    **_of("MistralForCausalLM MixtralForCausalLM Mistral3ForConditionalGeneration"
          " Ministral3ForCausalLM MistralLarge3ForCausalLM PixtralForConditionalGeneration"
          " VoxtralForConditionalGeneration", _MISTRAL),
    **_of("DeepseekV3ForCausalLM", _DEEPSEEK_V3),
    **_of("DeepseekV32ForCausalLM", _DEEPSEEK_V32),
    **_of("DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration",
          Format("deepseek_v4", (_DSML,), "deepseek_v4", sign="")),
    **_of("DeepseekV41ForCausalLM", Format("deepseek_v41", (_DSML,), "deepseek_v41", sign="")),
    **_of("KimiK25ForConditionalGeneration KimiLinearForCausalLM", _KIMI_K2),
    **_of("KimiK3ForConditionalGeneration", Format("kimi_k3", ("<|open|>",), "kimi_k3", sign="")),
    **_of("Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM"
          " Glm4vMoeForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration",
          _GLM),
    **_of("GptOssForCausalLM", _GPT_OSS),
    **_of("Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM"
          " Gemma3nForConditionalGeneration", _PYTHONIC),
    **_of("Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration"
          " DiffusionGemmaForBlockDiffusion", _GEMMA4),
    **_of("MiniMaxM2ForCausalLM", _MINIMAX_M2),
    **_of("MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration", _MINIMAX_M3),
    # The second is Granite 4.2's.
    **_of("GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM", _GRANITE,
          replace(_QWEN_CODER, reasoning="granite_thinking_parser")),
    **_of("GraniteMoeHybridForCausalLM", Format("granite4", ("<tool_call>",))),
    **_of("Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration",
          Format("ernie45", ("<tool_call>",), "ernie45")),
    **_of("BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration",
          Format("ling3", ("<tool_call>", "<arg_key>"), "ling3")),
    **_of("LagunaForCausalLM", Format("poolside_v1", ("<tool_call>", "<arg_key>"),
                                      "poolside_v1", "poolside_v1")),
    **_of("HYV3ForCausalLM", Format("hy_v3", _HY_MARKS, "hy_v3", sign="<think")),
    **_of("HYV4ForCausalLM", Format("hy_v4", _HY_MARKS, "hy_v4", sign="<think")),
    **_of("HunYuanMoEV1ForCausalLM HunYuanDenseV1ForCausalLM", _HUNYUAN),
    **_of("InklingForCausalLM InklingForConditionalGeneration",
          Format("inkling", reasoning="inkling", sign="")),
    **_of("MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration", _MUSE),
    **_of("Plamo3ForCausalLM", _PLAMO3),
    **_of("K2HorizonForCausalLM", _K2_HORIZON),
    **_of("JambaForCausalLM", Format("jamba", ("<tool_calls>",))),
    **_of("SeedOssForCausalLM", _SEED),
    **_of("Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration", _LFM2),
    **_of("Olmo3ForCausalLM", _OLMO3),
    **_of("Phi3ForCausalLM", _PHI4),
    **_of("LongcatFlashForCausalLM LongcatFlashNgramForCausalLM", _LONGCAT),
    **_of("ApertusForCausalLM", _APERTUS),
    **_of("Dots3NoteForCausalLM", _DOTS),
    **_of("InternLM2ForCausalLM InternLM3ForCausalLM InternS1ForConditionalGeneration", _INTERNLM),
    **_of("Cohere2ForCausalLM Cohere2VisionForConditionalGeneration", _COHERE),
    **_of("Cohere2MoeForCausalLM",
          Format("cohere_command4", ("<|START_ACTION|>",), "cohere_command4", sign="")),
}  # fmt: skip

_THINK = ("<think>", "</think>")
_DEEPSEEK_TOKENS = (_DEEPSEEK_CALLS, deepseek("tool▁calls▁end"))
# Tokens that these parsers require in a model's vocabulary; without them every request fails.
# (Those of `hy_v3` and `hy_v4` end in a suffix of the model's.)
TOOL_TOKENS: dict[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK_TOKENS,
    "deepseek_v31": _DEEPSEEK_TOKENS,
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
}
REASONING_TOKENS: dict[str, tuple[str, ...]] = {
    "deepseek_r1": _THINK,
    "ernie45": _THINK,
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[TOOL_CALLS]",),
    "poolside_v1": ("<assistant>",),
    "step3": ("</think>",),
}
# Packages that these parsers import, and that vLLM does not require.
PACKAGES = {"cohere_command3": "cohere_melody", "cohere_command4": "cohere_melody"}


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings with the parsers of the model that is served.

    ``said`` tells which they are and why, for a log; ``problem`` tells an operator what to do.
    """

    settings: Settings
    said: str
    problem: str | None = None


def with_parsers(settings: Settings, known: Prompting | None, why_unknown: str = "") -> Choice:
    """Return settings with parsers for the model, unless they name some."""
    default = engine_arguments(settings.model, gpu=False)
    if TOOL_CALL_PARSER in default:
        found = Parsers(default[TOOL_CALL_PARSER], why="as the embedded model writes them")
    elif known is None:
        found = Parsers(
            problem=f"tools are refused: {why_unknown}; or set engine.{TOOL_CALL_PARSER} and "
            f"engine.{REASONING_PARSER}"
        )
    else:
        found = choose(known)
    chosen = {name: value for name, value in found.arguments().items() if name not in default}
    by_hand = {*settings.engine, *settings.decoders.engine} & {TOOL_CALL_PARSER, AUTO_TOOL_CHOICE}
    settings = settings.model_copy(update={"engine": chosen | _plain(settings.engine)})
    for name in ("decoders", "prefillers"):
        role = getattr(settings, name)
        # Change only what differs: elsewhere the fields that are set tell what was asked for.
        if (plain := _plain(role.engine)) != role.engine:
            settings = settings.model_copy(update={name: role.model_copy(update={"engine": plain})})
    said = _said(found, {**default, **settings.engine, **settings.decoders.engine})
    return Choice(settings, said, None if by_hand else found.problem)


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's engine arguments as vLLM takes them, with or without a parser."""
    plain = dict(arguments)
    if TOOL_CALL_PARSER in plain:
        # vLLM would look for a parser with an empty name.
        plain[TOOL_CALL_PARSER] = plain[TOOL_CALL_PARSER] or None
        plain.setdefault(AUTO_TOOL_CHOICE, plain[TOOL_CALL_PARSER] is not None)
    if REASONING_PARSER in plain:
        plain[REASONING_PARSER] = plain[REASONING_PARSER] or ""
    return plain


def _said(found: Parsers, told: Mapping[str, Any]) -> str:
    tool = told.get(TOOL_CALL_PARSER) if told.get(AUTO_TOOL_CHOICE) else None
    why = f" ({found.why})" if tool else ""
    if told.get(TOOL_CALL_PARSER) != found.tool:
        why = " (as set)"
    elif tool != found.tool:
        why = f" ({AUTO_TOOL_CHOICE} is off)"
    reasoning = told.get(REASONING_PARSER) or None
    set_too = " (as set)" if reasoning != found.reasoning else ""
    return f"tool calls: {tool or 'none'}{why}; reasoning: {reasoning or 'none'}{set_too}"


def choose(known: Prompting) -> Parsers:
    name = known.architectures[0] if known.architectures else "no architecture"
    candidates = list(_candidates(known))
    reasoning = _reasoning(known, candidates[0][0] if candidates else None)
    if not known.shows_tools:
        return Parsers(
            reasoning=reasoning,
            problem=f"tools are refused: the chat template of this model ({name}) shows it none; "
            "set engine.chat_template to one that does",
        )
    unusable: list[Format] = []
    for found, why in candidates:
        if found.tool is None:
            return Parsers(
                reasoning=reasoning,
                problem=f"tools are refused: no parser of vLLM's reads {_named(found)}, as this "
                f"model ({name}) writes calls",
            )
        if not _usable(known, found.tool, TOOL_TOKENS):
            unusable.append(found)
            continue
        problem = None
        if unusable and found not in unusable and not _shows(known.template or "", found):
            problem = (
                f"the chat template of this model ({name}) shows calls with {_named(unusable[0])}, "
                f"which {found.tool} does not read: set engine.chat_template to one for it, or "
                f"engine.{TOOL_CALL_PARSER}"
            )
        return Parsers(found.tool, _reasoning(known, found), why, problem)
    wanted = sorted({PACKAGES[one.tool] for one in unusable if one.tool in PACKAGES})
    if wanted and not known.packages >= set(wanted):
        what = f"reading the calls of this model ({name}) takes {wanted[0]}; pip install it"
    else:
        what = (
            f"which of vLLM's parsers reads the calls of this model ({name}) is not known; set "
            f"engine.{TOOL_CALL_PARSER} (docs/reference/models.md has a list)"
        )
    return Parsers(reasoning=reasoning, problem=f"tools are refused: {what}")


def _candidates(known: Prompting) -> Iterator[tuple[Format, str]]:
    name = next((name for name in known.architectures if name in ARCHITECTURES), None)
    own = () if name is None else ARCHITECTURES[name]
    if known.template is not None:
        shown = [one for one in (*own, *FORMATS) if _shows(known.template, one)]
        for found in sorted(shown, key=lambda one: -len(one.marks)):
            yield found, f"by {_named(found)} in its chat template"
    if own:
        yield own[0], f"by its architecture, {name}"


def _named(of: Format) -> str:
    return " and ".join(of.marks)


def _shows(template: str, of: Format) -> bool:
    return bool(of.marks) and all(mark in template for mark in of.marks)


def _usable(known: Prompting, parser: str, tokens: Mapping[str, tuple[str, ...]]) -> bool:
    if parser in PACKAGES and PACKAGES[parser] not in known.packages:
        return False
    wanted = tokens.get(parser, ())
    return known.tokens is None or all(token in known.tokens for token in wanted)


def _reasoning(known: Prompting, of: Format | None) -> str | None:
    template = known.template or ""
    own = None if of is None else of.reasoning
    found: str | None = None
    if of is not None and of.sign is not None and of.sign in template:
        found = own
    elif known.thinking == "on":
        found = own if of is not None and of.sign is None else None
        if found is None:
            # Many models write <think>; those that can be asked not to do it as Qwen3 does.
            found = "qwen3" if "enable_thinking" in template else "deepseek_r1"
    elif known.thinking == "off" and of is not None:
        found = of.on_request
    return found if found is not None and _usable(known, found, REASONING_TOKENS) else None
