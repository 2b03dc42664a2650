"""A profile: what one engine does on one kind of hardware, as curves with a few numbers each.

The planner, the simulator and the autoscaler read the same file. It is either measured
(``conserve profile``) or made from published figures; then each number has its source beside it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# Those that come with the repository are found by name.
FOLDER = Path(__file__).parents[1] / "profiles"

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ProfileError(ValueError):
    """A profile cannot be used; the message names it and says why, in one line."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quality(_Strict):
    """How well a curve fits its points.

    Attributes:
        r_squared: share of the points' variance that the curve explains.
        worst_residual_s: largest distance of a point from the curve.
        worst_residual_share: largest such distance as a share of what was measured there.
        typical_residual_share: the median of these shares.
        points: how many points there were.
    """

    r_squared: float
    worst_residual_s: NotNegative
    worst_residual_share: NotNegative
    typical_residual_share: NotNegative
    points: int = Field(ge=1)


class PrefillCurve(_Strict):
    """Time of a prefill, from the tokens that are new and those found in the prefix cache.

    Cold, it is ``constant_s + per_token_s n + per_token_squared_s n^2`` (ConServe, section 3.1 and
    figure 2). A new token attends to all before it, so an append of n tokens to c cached ones
    costs ``per_token_squared_s ((c + n)^2 - c^2)`` in the last term, which is the cold formula
    for c = 0, and ``per_cached_token_s c`` for finding and reading what was there.

    Attributes:
        cached_constant_s: the constant of a prefill that found something cached, and so ran on a
            decoder: the prefiller's constant has the handing over of KV in it. None: the same.
        longest_tokens: the longest prompt measured; beyond it, the curve extrapolates.
    """

    constant_s: NotNegative
    per_token_s: NotNegative
    per_token_squared_s: NotNegative
    per_cached_token_s: NotNegative = 0.0
    cached_constant_s: NotNegative | None = None
    longest_tokens: int | None = Field(default=None, ge=1)
    quality: Quality | None = None
    cached_quality: Quality | None = None

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if not self.constant_s + self.per_token_s + self.per_token_squared_s > 0:
            raise ValueError("a prefill that takes no time; give at least one of its terms")
        return self

    def seconds(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Time of a prefill that has the engine for itself."""
        constant_s = self.append_constant_s if cached_tokens else self.constant_s
        return constant_s + self.marginal_s(new_tokens, cached_tokens)

    @property
    def append_constant_s(self) -> float:
        """The constant of a prefill on an engine that hands no KV over."""
        return self.constant_s if self.cached_constant_s is None else self.cached_constant_s

    def marginal_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Time of a prefill without the constant: what it adds to an iteration that runs anyway."""
        pairs = new_tokens * (new_tokens + 2 * cached_tokens)
        return (
            self.per_token_s * new_tokens
            + self.per_token_squared_s * pairs
            + self.per_cached_token_s * cached_tokens
        )

    def tokens_per_s(self, input_tokens: float) -> float:
        """T_p of ConServe's section 4.1: cold prompts of this length, one after the other."""
        return input_tokens / self.seconds(input_tokens)


class DecodeCurve(_Strict):
    """Time of a decode iteration: ``constant_s + per_sequence_s b + per_kv_token_s k``.

    ``b`` sequences decode together, and ``k`` tokens of KV, of all of them, are read (ConServe,
    figure 4: constant while memory is idle, then linear in the KV that is read).
    """

    constant_s: Positive
    per_sequence_s: NotNegative
    per_kv_token_s: NotNegative
    quality: Quality | None = None

    def step_s(self, sequences: float, kv_tokens: float) -> float:
        """Time of an iteration: TBT of each of the sequences."""
        return self.constant_s + self.per_sequence_s * sequences + self.per_kv_token_s * kv_tokens

    def tokens_per_s(self, sequences: float, kv_tokens: float) -> float:
        """Output tokens of all sequences in a second."""
        return sequences / self.step_s(sequences, kv_tokens)


class Interference(_Strict):
    """Tells what a prefill adds to an iteration of running decodes (ConServe, figure 5).

    An iteration with both takes the decode's `DecodeCurve.step_s` plus ``prefill_share`` times
    the prefill's `PrefillCurve.marginal_s`: 1 if nothing overlaps, 0 if the prefill hides
    behind the decode's memory traffic.
    """

    prefill_share: NotNegative = 1.0
    quality: Quality | None = None


class Handoff(_Strict):
    """KV from a prefiller to a decoder: ``constant_s + per_token_s n`` (ConServe, figure 3)."""

    constant_s: NotNegative
    per_token_s: NotNegative
    bytes_per_token: Positive
    quality: Quality | None = None

    def seconds(self, tokens: float) -> float:
        """Time until the decoder has the KV of so many tokens."""
        return self.constant_s + self.per_token_s * tokens


class Overhead(_Strict):
    """Tells what a turn takes until its first token, beside its engines and its KV's way.

    The router, its look-up in the conversation table, HTTP. Unknown (0) where only engines were
    measured, or an engine was described in a paper.

    Attributes:
        direct_s: for a turn that one engine prefills and answers.
        handed_off_s: for a turn that a prefiller prefills and a decoder answers.
    """

    direct_s: NotNegative = 0.0
    handed_off_s: NotNegative = 0.0
    quality: Quality | None = None


class CappedPower(_Strict):
    """One engine's draw under a cap, and what the cap costs.

    Attributes:
        cap_w: the cap; a profile's highest is the hardware's own limit.
        idle_w, prefill_w, decode_w: power drawn while idle, in prefill and in decode.
        prefill_slowdown, decode_slowdown: factors by which prefill and decode take longer than
            the curves say.
    """

    cap_w: Positive
    idle_w: NotNegative
    prefill_w: Positive
    decode_w: Positive
    prefill_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    decode_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0


class Profile(_Strict):
    """Tells what one engine does.

    Attributes:
        origin: ``measured`` here, or ``published``: from a paper's and data sheets' figures.
        model: the model's name as it is served (`conserve.settings.Settings.model_id`).
        versions, hardware: what it was measured with, as far as known.
        max_batched_tokens: most tokens of one iteration, prefills' chunks included; by role.
        power: draws by cap, the highest cap first; none where nothing could be read.
        sources: where a number comes from, by the number's path (``prefill.per_token_s``).
        points: what was measured, by curve; each point names its units.
    """

    format: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN)
    origin: Literal["measured", "published"]
    model: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}")
    versions: dict[str, str | None]
    hardware: dict[str, str | int | float | list[str] | None]
    prefill: PrefillCurve
    decode: DecodeCurve
    interference: Interference = Interference()
    handoff: Handoff
    overhead: Overhead = Overhead()
    kv_capacity_tokens: int = Field(ge=1)
    max_batched_tokens: dict[Literal["prefiller", "decoder", "collocated"], int] = Field(
        default_factory=dict
    )
    power: tuple[CappedPower, ...] = ()
    sources: dict[str, str] = Field(default_factory=dict)
    points: dict[str, list[dict[str, float]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _published_numbers_have_sources(self) -> Self:
        if self.origin == "published":
            # An empty source is no source; a group's serves each number in it.
            given = {path for path, text in self.sources.items() if text.strip()}
            for path in _numbers(self):
                if not any(path == one or path.startswith(f"{one}.") for one in given):
                    raise ValueError(f"sources: {path} is a published number without a source")
        return self

    @model_validator(mode="after")
    def _caps_descend(self) -> Self:
        caps = [power.cap_w for power in self.power]
        if caps != sorted(set(caps), reverse=True):
            raise ValueError("power: give each cap once, the highest first")
        return self

    def power_at(self, cap_w: float | None) -> CappedPower:
        """The draw under a cap; None: the highest.

        Raises:
            ProfileError: this profile says nothing of power, or not under that cap.
        """
        if not self.power:
            raise ProfileError(f"profile {self.name} has no power: none could be read for it")
        if cap_w is None:
            return self.power[0]
        for power in self.power:
            if power.cap_w == cap_w:
                return power
        known = ", ".join(f"{power.cap_w:g}" for power in self.power)
        raise ProfileError(f"profile {self.name} has no cap of {cap_w:g} W, only {known} W")

    def require_serves(self, model: str, versions: Mapping[str, str | None]) -> None:
        """Refuse where another model, or another version of the engine, is served.

        Args:
            model: the served model's id.
            versions: versions of the packages that run, by name; those that this profile names
                are compared.

        Raises:
            ProfileError: this profile was made for another.
        """
        if model != self.model:
            raise ProfileError(
                f"profile {self.name} is of the model {self.model}, but {model} is served; "
                "measure that one: conserve profile"
            )
        for package, version in self.versions.items():
            served = versions.get(package)
            if version is not None and served is not None and version != served:
                raise ProfileError(
                    f"profile {self.name} was made with {package} {version}, but {served} runs; "
                    "measure again: conserve profile"
                )


def load_profile(source: Path | str) -> Profile:
    """Read a profile: a file, or the name of one that comes with ConServe.

    Raises:
        ProfileError: there is none, or it is not valid.
    """
    path = Path(source)
    if not path.exists() and (FOLDER / f"{source}.json").exists():
        path = FOLDER / f"{source}.json"
    try:
        text = path.read_bytes()
    except OSError as error:
        known = ", ".join(sorted(found.stem for found in FOLDER.glob("*.json")))
        raise ProfileError(
            f"profile {source} cannot be read ({error.strerror}); those by name: {known or 'none'}"
        ) from None
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise ProfileError(
            f"profile {path} is not valid: {f'{field}: ' if field else ''}{said}"
        ) from None


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON that `load_profile` reads.

    Raises:
        ProfileError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be written: {error.strerror}") from None


_CURVES = ("prefill", "decode", "interference", "handoff")


def _numbers(profile: Profile) -> list[str]:
    """Paths of the numbers that are not about how well a curve fits."""
    found = ["kv_capacity_tokens"]
    for curve in _CURVES:
        values = getattr(profile, curve).model_dump()
        found += [
            f"{curve}.{name}" for name, value in values.items() if type(value) in (int, float)
        ]
    # Zero says that it is not known.
    overhead = profile.overhead
    found += [
        f"overhead.{name}" for name in ("direct_s", "handed_off_s") if getattr(overhead, name)
    ]
    found += [f"max_batched_tokens.{role}" for role in profile.max_batched_tokens]
    for power in profile.power:
        found += [f"power.{power.cap_w:g}.{name}" for name in power.model_dump() if name != "cap_w"]
    return found
