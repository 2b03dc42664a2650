import json
from pathlib import Path
from typing import Any

import pytest

from autoscale.capacity.profile import (
    FOLDER,
    PrefillCurve,
    Profile,
    ProfileError,
    StageSize,
    load_profile,
)
from conserve.engines import engine_arguments
from conserve_lab.capacity.fit import (
    DecodePoint,
    HandoffPoint,
    MixedPoint,
    PrefillPoint,
    TurnPoint,
    fit_decode,
    fit_handoff,
    fit_interference,
    fit_overhead,
    fit_prefill,
)


@pytest.fixture
def a40() -> Profile:
    return load_profile("a40-qwen3-0.6b")


def unsourced(profile: Profile) -> list[str]:
    # A group's source serves each number in it; an empty one serves none.
    given = {name for name, text in profile.sources.items() if text.strip()}
    groups = tuple(f"{one}." for one in given)
    return [one for one in _numbers(profile) if one not in given and not one.startswith(groups)]


def _numbers(profile: Profile) -> list[str]:
    found = ["kv_capacity_tokens"]
    for curve in ("prefill", "decode", "interference", "handoff", "overhead"):
        found += [
            f"{curve}.{name}"
            for name, value in getattr(profile, curve).model_dump().items()
            # Zero means that the overhead is not known.
            if type(value) in (int, float) and (value or curve != "overhead")
        ]
    if profile.encoding is not None:
        found.append("encoding.per_token_s")
    if profile.stages is not None:
        found += ["stages.sms", "stages.output_tokens"]
        found += [f"stages.sizes.{name}" for name in StageSize.model_fields]
    found += [f"max_batched_tokens.{role}" for role in profile.max_batched_tokens]
    for power in profile.power:
        found += [f"power.{power.cap_w:g}.{name}" for name in power.model_dump() if name != "cap_w"]
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_each_published_number_has_a_source(path: Path) -> None:
    profile = load_profile(path)
    assert profile.origin == "measured" or not unsourced(profile)


def test_the_papers_profile_gives_the_figures_that_the_paper_states(a40: Profile) -> None:
    assert 15_000 / a40.prefill.seconds(15_000) == pytest.approx(25_000, rel=1e-3)
    sixteen_thousand_each = 300_000 / 16_000
    step_s = a40.decode.step_s(sixteen_thousand_each, 300_000)
    assert sixteen_thousand_each / step_s == pytest.approx(1000, rel=1e-3)
    assert a40.kv_capacity_tokens == 300_000
    assert [power.cap_w for power in a40.power] == [300, 200]


def test_the_h100s_numbers_follow_from_those_that_its_sources_name() -> None:
    profile = load_profile("h100-qwen3-8b")
    assert profile.origin == "published"
    # 36 layers of 8 KV heads of 128, keys and values, 16 bits each.
    kv_bytes = 36 * 2 * 8 * 128 * 2
    assert profile.handoff.bytes_per_token == kv_bytes
    assert profile.kv_capacity_tokens == pytest.approx((72e9 - 16.4e9 - 4e9) / kv_bytes, rel=1e-3)
    bandwidth = 0.75 * 3.35e12
    assert profile.decode.constant_s == pytest.approx(16.4e9 / bandwidth, rel=0.01)
    assert profile.decode.per_kv_token_s == pytest.approx(kv_bytes / bandwidth, rel=0.01)
    assert profile.prefill.per_token_s == pytest.approx(2 * 6.95e9 / (0.45 * 989e12), rel=0.01)
    assert profile.handoff.per_token_s == pytest.approx(2 * kv_bytes / 25e9, rel=0.01)


def test_the_a6000s_numbers_follow_from_those_that_its_sources_name() -> None:
    profile = load_profile("a6000-cogagent")
    # Nova, table I: seconds on all of 84 SMs.
    encode_s, prefill_s, decode_s = 0.8068, 0.3241, 0.0289
    kv_bytes = 40 * 2 * 2 * 128 * 2
    prompt_tokens = 70e6 / kv_bytes
    assert profile.handoff.bytes_per_token == kv_bytes
    assert profile.prefill.seconds(prompt_tokens) == pytest.approx(prefill_s, rel=1e-3)
    assert profile.decode.step_s(1, prompt_tokens) == pytest.approx(decode_s, rel=1e-2)
    assert profile.decode.step_s(10, 10 * prompt_tokens) == pytest.approx(0.0306, rel=1e-2)
    assert profile.encoding is not None
    assert profile.encoding.per_token_s * 1600 == pytest.approx(encode_s, rel=1e-3)
    assert profile.kv_capacity_tokens == pytest.approx((43.2e9 - 29e9) / kv_bytes, rel=1e-2)
    stages = profile.stages
    assert stages is not None
    for size in stages.sizes:
        others = 84 / (84 - size.decode_sms)
        assert size.encode_s == pytest.approx(encode_s * others, abs=1e-4)
        assert size.prefill_s == pytest.approx(prefill_s * others, abs=1e-4)
        beside = (size.decode_beside_encode_s, size.decode_beside_prefill_s)
        knees = [decode_s * max(1, knee / size.decode_sms) for knee in (24, 30)]
        assert beside == pytest.approx(knees, abs=1e-4)


def test_the_measured_profiles_curves_are_those_of_its_points() -> None:
    profile = load_profile("cpu-embedded")
    assert profile.origin == "measured"
    # What vLLM's server takes on a CPU where nothing else is set, as `conserve.engines` does.
    assert "max_num_batched_tokens" not in engine_arguments(profile.model, gpu=False)
    assert set(profile.max_batched_tokens.values()) == {2048}
    prefill = fit_prefill([PrefillPoint(**point) for point in profile.points["prefill"]])
    decode = fit_decode([DecodePoint(**point) for point in profile.points["decode"]])
    beside = [MixedPoint(**point) for point in profile.points["interference"]]
    handoffs = [HandoffPoint(**point) for point in profile.points["handoff"]]
    turns = [TurnPoint(**point) for point in profile.points["overhead"]]
    fitted = (
        (prefill, profile.prefill),
        (decode, profile.decode),
        (fit_interference(beside, prefill, decode), profile.interference),
        (fit_handoff(handoffs, profile.handoff.bytes_per_token), profile.handoff),
        (fit_overhead(turns), profile.overhead),
    )
    for curve, stored in fitted:
        for name, value in stored.model_dump(exclude={"quality", "cached_quality"}).items():
            assert getattr(curve, name) == pytest.approx(value, rel=1e-9), name


def spoilt(profile: str, change: dict[str, Any], folder: Path) -> Path:
    """Write a profile with other values at some paths, such as ``decode/constant_s``."""
    data = json.loads(load_profile(profile).model_dump_json())
    for name, value in change.items():
        *groups, last = name.split("/")
        into = data
        for group in groups:
            into = into[group]
        into[last] = value
    path = folder / "spoilt.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("profile", "change", "number"),
    [
        ("a40-qwen3-0.6b", {"sources/decode.per_kv_token_s": " "}, "decode.per_kv_token_s"),
        ("a40-qwen3-0.6b", {"overhead/handed_off_s": 0.01}, "overhead.handed_off_s"),
        *(
            ("a6000-cogagent", {f"sources/stages.{number}": ""}, f"stages.{number}")
            for number in ("sms", "output_tokens", "sizes.decode_beside_prefill_s")
        ),
    ],
)
def test_a_published_number_needs_a_source(
    tmp_path: Path, profile: str, change: dict[str, Any], number: str
) -> None:
    assert number in unsourced(load_profile(spoilt(profile, change, tmp_path)))
    # A group's source serves each number in it.
    group = number.partition(".")[0] if "overhead" in number else number
    given = change | {f"sources/{group}": "a blog"}
    assert not unsourced(load_profile(spoilt(profile, given, tmp_path)))


def sizes(*sms: int, **change: float) -> dict[str, Any]:
    """Stages on these SMs, each like the first that is known."""
    stages = load_profile("a6000-cogagent").stages
    assert stages is not None
    some = stages.sizes[0].model_dump() | change
    return {"stages/sizes": [some | {"decode_sms": one} for one in sms]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_capacity_tokens": 0}, "kv_capacity_tokens"),
        ({"handoff/constant_s": "inf"}, "constant_s"),
        (sizes(24, 16), "stages: sizes: give each decode_sms once, the smallest first"),
        (sizes(16, 84), "stages: sizes: decodes with 84 of 84 SMs leave none"),
    ],
)
def test_a_broken_profile_is_one_clear_line(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = spoilt("a6000-cogagent", change, tmp_path)
    with pytest.raises(ProfileError) as refused:
        load_profile(path)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def test_no_profile_of_that_name_says_which_there_are() -> None:
    with pytest.raises(ProfileError, match=r"h100 cannot be read .* a40-qwen3-0\.6b"):
        load_profile("h100")


def test_another_model_or_version_is_refused(a40: Profile) -> None:
    profile = a40.model_copy(update={"versions": {"vllm": "0.29.0", "lmcache": None}})
    profile.require_serves("Qwen/Qwen3-0.6B", {"vllm": "0.29.0", "lmcache": "0.5.6"})
    profile.require_serves("Qwen/Qwen3-0.6B", {})
    with pytest.raises(ProfileError, match=r"of the model Qwen/Qwen3-0\.6B, but other is served"):
        profile.require_serves("other", {"vllm": "0.29.0"})
    with pytest.raises(ProfileError, match=r"made with vllm 0\.29\.0, but 0\.30\.0 runs"):
        profile.require_serves("Qwen/Qwen3-0.6B", {"vllm": "0.30.0"})


def test_chunks_of_a_prefill_add_up_to_the_whole() -> None:
    curve = PrefillCurve(constant_s=0.01, per_token_s=1e-5, per_token_squared_s=2e-9)
    chunks = [(8192, 0), (8192, 8192), (3616, 16384)]
    assert sum(curve.marginal_s(new, cached) for new, cached in chunks) == pytest.approx(
        curve.marginal_s(20_000)
    )
    assert curve.seconds(20_000) == pytest.approx(0.01 + 0.2 + 0.8)


def test_a_cached_prefix_costs_its_own_term_and_its_share_of_attention() -> None:
    curve = PrefillCurve(
        constant_s=0.01, per_token_s=1e-5, per_token_squared_s=2e-9, per_cached_token_s=1e-6
    )
    appended = curve.seconds(100, 10_000)
    assert appended == pytest.approx(0.01 + 0.001 + 2e-9 * (10_100**2 - 10_000**2) + 0.01)
