"""Finds how a model is prompted: its architecture, chat template and tokens, for its parsers.

They are read from small files in a folder, in Hugging Face's cache, or on its hub.
"""

import importlib.util
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conserve import parsers
from conserve.engines import model_source
from conserve.settings import EMBEDDED_MODELS, Settings
from deployments.model_files import find_file
from hetero.model_shape import ModelUnknown

logger = logging.getLogger("conserve.models")

_TOKENS = {*chain(*parsers.TOOL_TOKENS.values(), *parsers.REASONING_TOKENS.values())}
_OPENED, _CLOSED = "<think>", "</think>"
# No template has these texts.
_ASKED, _TOOL = "conserve-asked", "conserve_tool"


def parsers_of(settings: Settings) -> parsers.Choice:
    """Return settings with parsers for the model that is served, where they name none."""
    if settings.model in EMBEDDED_MODELS:
        return parsers.with_parsers(settings, None)
    try:
        return parsers.with_parsers(settings, prompting(settings))
    except ModelUnknown as error:
        return parsers.with_parsers(settings, None, f"model: {error}")


def prompting(settings: Settings) -> parsers.Prompting:
    """Return how the served model is prompted; raises `ModelUnknown` if that cannot be read."""
    source = model_source(settings.model)
    arguments = settings.engine | settings.decoders.engine
    model = _Files(source, arguments.get("revision"))
    config = model.json("config.json")
    if config is None:
        raise ModelUnknown(
            f"config.json of {source!r} cannot be read; download the model, and give its folder or "
            "its id"
        )
    overrides = arguments.get("hf_overrides")
    names = {**config, **(overrides if isinstance(overrides, Mapping) else {})}.get("architectures")
    if arguments.get("tokenizer"):
        model = _Files(str(arguments["tokenizer"]), arguments.get("tokenizer_revision"))
    said = model.json("tokenizer_config.json") or {}
    known = parsers.Prompting(
        tuple(names) if isinstance(names, list) else (),
        tokens=_tokens(model, said),
        packages={name for name in parsers.PACKAGES.values() if importlib.util.find_spec(name)},
    )
    templates = _templates(model, said, arguments.get("chat_template"))
    if not templates:
        return known
    plain = templates.get("default") or next(iter(templates.values()))
    with_tools = templates.get("tool_use", plain)
    switches = arguments.get("default_chat_template_kwargs")
    return replace(
        known,
        template=with_tools,
        shows_tools=shows_tools(with_tools),
        thinking=thinking(plain, switches if isinstance(switches, Mapping) else {}),
    )


def thinking(template: str, switches: Mapping[str, Any] | None = None) -> parsers.Thinking:
    """Return whether a model reasons before it answers, by how its prompts end.

    ``switches`` are variables that each request's template gets, unless it says otherwise.
    """
    asked, declined = (dict.fromkeys(("enable_thinking", "thinking"), value)
                       for value in (True, False))  # fmt: skip
    for given in ({}, dict(switches or {})):
        end = _end(template, given)
        if _opens(end) or (not _closes(end) and _closes(_end(template, given | declined))):
            return "on"
    return "off" if _opens(_end(template, asked)) else "unsaid"


def shows_tools(template: str) -> bool:
    """Return whether a template shows a model the tools of a request."""
    function = {
        "name": _TOOL,
        "description": "None.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }
    tools = [{"type": "function", "function": function}]
    # Some show them in the system's prompt, if there is one.
    system = [{"role": "system", "content": "None."}]
    shown = [_rendered(template, before, {"tools": tools}) for before in ([], system)]
    prompts = [prompt for prompt in shown if prompt is not None]
    return any(_TOOL in prompt for prompt in prompts) if prompts else "tools" in template


def _opens(end: str) -> bool:
    return end.rfind(_OPENED) > end.rfind(_CLOSED)


def _closes(end: str) -> bool:
    return _CLOSED in end and not _opens(end)


def _end(template: str, variables: Mapping[str, Any]) -> str:
    """Return what follows a user's message in the prompt for an answer."""
    return (_rendered(template, [], variables) or "").rpartition(_ASKED)[2]


def _rendered(
    template: str, before: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str | None:
    """Return a prompt with one message of a user's; None if the template takes no such message."""
    parts = [{"type": "text", "text": _ASKED}]
    for content in (_ASKED, parts):
        messages = [*before, {"role": "user", "content": content}]
        try:
            prompt = _ENVIRONMENT.from_string(template).render(
                messages=messages,
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
                **variables,
            )
        except Exception as error:
            # A template is a program of its own, and may raise anything.
            logger.debug("a chat template fails: %s", error)
            continue
        if _ASKED in prompt:
            return prompt
    return None


@dataclass(frozen=True, slots=True)
class _Files:
    """The small files of a model, in a folder, or by its id in the hub's cache and on the hub."""

    source: str
    revision: str | None

    def text(self, name: str, fetch: bool = True) -> str | None:
        """Return a file's text; None if it cannot be read."""
        path = find_file(self.source, name, self.revision, fetches=fetch)
        try:
            return None if path is None else path.read_text()
        except (OSError, ValueError) as error:
            logger.debug("%s of %s cannot be read: %s", name, self.source, error)
            return None

    def json(self, name: str) -> dict[str, Any] | None:
        """Return a file's object; None if there is none."""
        text = self.text(name)
        try:
            value = None if text is None else json.loads(text)
        except ValueError as error:
            logger.warning("%s of %s is not JSON: %s", name, self.source, error)
            return None
        return value if isinstance(value, dict) else None


def _templates(model: _Files, config: Mapping[str, Any], set_as: Any) -> dict[str, str]:
    """Return chat templates by name, as vLLM finds them."""
    own = _own_templates(model, config)
    if not isinstance(set_as, str) or not set_as:
        return own
    if "{" not in set_as and set_as in own:
        return {"default": own[set_as]}
    try:
        path = Path(set_as)
        return {"default": path.read_text() if path.is_file() else set_as}
    except OSError:
        # A template as text may be too long for a path.
        return {"default": set_as}


def _own_templates(model: _Files, config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    said = config.get("chat_template")
    if isinstance(said, str):
        found["default"] = said
    elif isinstance(said, list):
        named = [one for one in said if isinstance(one, dict)]
        found = {str(one.get("name")): str(one.get("template")) for one in named}
    plain = model.text("chat_template.jinja")
    if plain is not None:
        found["default"] = plain
    with_tools = model.text("additional_chat_templates/tool_use.jinja")
    if with_tools is not None:
        found["tool_use"] = with_tools
    if not found:
        said = (model.json("chat_template.json") or {}).get("chat_template")
        if isinstance(said, str):
            found["default"] = said
    return found


def _tokens(model: _Files, config: Mapping[str, Any]) -> frozenset[str] | None:
    """Return which of the tokens that parsers look for the model has; None: not known."""
    added = config.get("added_tokens_decoder")
    found: set[str] = set()
    if isinstance(added, dict):
        found = {str(one.get("content")) for one in added.values() if isinstance(one, dict)}
    # Its ten megabytes are fetched only where the configuration lists no tokens.
    texts = [model.text(name, fetch=not found) for name in ("tokenizer.json", "tekken.json")]
    texts = [text for text in texts if text is not None]
    if not texts and not found:
        return None
    for token in _TOKENS - found:
        # Any form of vocabulary has the token as a JSON string.
        written = (json.dumps(token), json.dumps(token, ensure_ascii=False))
        if any(form in text for text in texts if text is not None for form in written):
            found.add(token)
    return frozenset(found & _TOKENS)


class _Generation(jinja2.ext.Extension):
    """Ignores ``{% generation %}``, by which training finds what a model has said."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are rendered in, as transformers has it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, indent=how.get("indent")
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT = _environment()
