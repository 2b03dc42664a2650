"""Describes one engine on one kind of hardware, as curves with a few numbers each.

The planner, the simulator and the autoscaler read the same file. It is measured (``conserve
profile``), or made from published figures with a source for each number.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# The profiles here are found by name.
FOLDER = Path(__file__).parents[1] / "profiles"

NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ProfileError(ValueError):
    """A profile cannot be used; the message says why, in one line."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quality(_Strict):
    """How well a curve fits its points; a ``_share`` is relative to what was measured."""

    r_squared: float
    worst_residual_s: NotNegative
    worst_residual_share: NotNegative
    typical_residual_share: NotNegative
    points: int = Field(ge=1)


class PrefillCurve(_Strict):
    """Time of a prefill, from new tokens and those found in the prefix cache.

    Cold, it is ``constant_s + per_token_s n + per_token_squared_s n^2`` (ConServe, section 3.1 and
    figure 2). An append of n tokens to c cached ones has ``(c + n)^2 - c^2`` for ``n^2``, and takes
    ``per_cached_token_s c`` to find and read the cached ones.
    """

    constant_s: NotNegative
    per_token_s: NotNegative
    per_token_squared_s: NotNegative
    per_cached_token_s: NotNegative = 0.0
    # Without handing KV over, which the constant includes. None: the same.
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
        """Return the time of a prefill that has the engine for itself."""
        constant_s = self.append_constant_s if cached_tokens else self.constant_s
        return constant_s + self.marginal_s(new_tokens, cached_tokens)

    @property
    def append_constant_s(self) -> float:
        return self.constant_s if self.cached_constant_s is None else self.cached_constant_s

    def marginal_s(self, new_tokens: float, cached_tokens: float = 0) -> float:
        """Return the time that a prefill adds to an iteration that runs anyway."""
        pairs = new_tokens * (new_tokens + 2 * cached_tokens)
        return (
            self.per_token_s * new_tokens
            + self.per_token_squared_s * pairs
            + self.per_cached_token_s * cached_tokens
        )


class DecodeCurve(_Strict):
    """Time of a decode iteration: ``constant_s + per_sequence_s b + per_kv_token_s k``.

    ``b`` sequences decode together and read ``k`` tokens of KV in all (ConServe, figure 4).
    """

    constant_s: Positive
    per_sequence_s: NotNegative
    per_kv_token_s: NotNegative
    quality: Quality | None = None

    def step_s(self, sequences: float, kv_tokens: float) -> float:
        return self.constant_s + self.per_sequence_s * sequences + self.per_kv_token_s * kv_tokens


class Interference(_Strict):
    """The time that a prefill adds to an iteration of decodes (ConServe, figure 5).

    The iteration takes `DecodeCurve.step_s` plus ``prefill_share`` (1: nothing overlaps, 0: the
    decode's memory traffic hides the prefill) times `PrefillCurve.marginal_s`.
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
        return self.constant_s + self.per_token_s * tokens


class Encoding(_Strict):
    """Time to encode an image: ``per_token_s`` for each of its embeddings, in an iteration."""

    per_token_s: NotNegative
    quality: Quality | None = None


class StageSize(_Strict):
    """Times of stages that run beside each other while decodes have ``decode_sms`` of the SMs.

    Encode and prefill have the others, one of them at a time. ``decode_beside_`` is the time of a
    decode step meanwhile.
    """

    decode_sms: int = Field(ge=1)
    encode_s: Positive
    prefill_s: Positive
    decode_beside_encode_s: Positive
    decode_beside_prefill_s: Positive


class StageCurves(_Strict):
    """Times of encode, prefill and decode by how a GPU's SMs are divided (Nova, section III-C)."""

    sms: int = Field(ge=2)  # All of the engine's.
    output_tokens: Positive  # Mean of an answer (N of equation 1).
    sizes: tuple[StageSize, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        sizes = [size.decode_sms for size in self.sizes]
        if sizes != sorted(set(sizes)):
            raise ValueError("sizes: give each decode_sms once, the smallest first")
        if sizes[-1] >= self.sms:
            raise ValueError(
                f"sizes: decodes with {sizes[-1]} of {self.sms} SMs leave none for the other "
                "stages; leave that size out"
            )
        return self


class Overhead(_Strict):
    """Time of a turn in the router, the table and HTTP until its first token; 0: not known."""

    direct_s: NotNegative = 0.0
    handed_off_s: NotNegative = 0.0
    quality: Quality | None = None


class CappedPower(_Strict):
    """An engine's power under a cap; a profile's highest cap is the hardware's own limit."""

    cap_w: Positive
    idle_w: NotNegative
    prefill_w: Positive
    decode_w: Positive
    prefill_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    decode_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0


class Profile(_Strict):
    """One engine's curves, and where they come from."""

    format: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN)
    origin: Literal["measured", "published"]
    # As it is served: `conserve.settings.Settings.model_id`.
    model: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}")
    versions: dict[str, str | None]
    hardware: dict[str, str | int | float | list[str] | None]
    prefill: PrefillCurve
    decode: DecodeCurve
    interference: Interference = Interference()
    handoff: Handoff
    overhead: Overhead = Overhead()
    # None: the model reads text only, or its encoder was not measured.
    encoding: Encoding | None = None
    # None: stages were not measured beside each other.
    stages: StageCurves | None = None
    kv_capacity_tokens: int = Field(ge=1)
    # The most tokens of one iteration.
    max_batched_tokens: dict[Literal["prefiller", "decoder", "collocated"], int] = Field(
        default_factory=dict
    )
    # The highest cap first; empty if none could be read.
    power: tuple[CappedPower, ...] = ()
    # By the number's path: `prefill.per_token_s`.
    sources: dict[str, str] = Field(default_factory=dict)
    points: dict[str, list[dict[str, float]]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _caps_descend(self) -> Self:
        caps = [power.cap_w for power in self.power]
        if caps != sorted(set(caps), reverse=True):
            raise ValueError("power: give each cap once, the highest first")
        return self

    def power_at(self, cap_w: float | None) -> CappedPower:
        """Return the power under a cap (None: the highest); raises `ProfileError`."""
        if not self.power:
            raise ProfileError(f"profile {self.name} has no power: none could be read for it")
        if cap_w is None:
            return self.power[0]
        for power in self.power:
            if power.cap_w == cap_w:
                return power
        known = ", ".join(f"{power.cap_w:g}" for power in self.power)
        raise ProfileError(f"profile {self.name} has no cap of {cap_w:g} W, only {known} W")

    def off_on(self, dtype: str) -> str:
        """Return in words that its times are not those of a CPU for this dtype; empty: alike."""
        of = self.hardware.get("cpu_dtype", "bfloat16")  # Older ones are of such CPUs.
        if self.hardware.get("gpus") or of == dtype:
            return ""
        said = f"profile {self.name} is of a CPU with kernels for {of} ({self.hardware.get('cpu')})"
        return f"; {said}, and its times may be far off here: measure them with conserve profile"

    def require_serves(self, model: str, versions: Mapping[str, str | None]) -> None:
        """Raise `ProfileError` if this profile is of another model or package version."""
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
    """Read a profile from a file, or by the name of an included one; raises `ProfileError`."""
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
