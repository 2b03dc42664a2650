"""Settings are checked once, and refused by name."""

import json
import os
from typing import Any

import pytest

from conserve.pausing import patience_s
from conserve.placement import (
    CollocatedPlacement,
    ConversationPlacement,
    ElasticPlacement,
    PlacementPolicy,
    Prefiller,
    make_policy,
)
from conserve.policies import room_policies
from conserve.settings import Settings, SettingsError, load
from conserve.settings.loading import LIKE


def given(line: str) -> dict[str, Any]:
    """Arguments as on a command line."""
    return dict(one.split("=", 1) for one in line.split())


def refusal(line: str) -> str:
    with pytest.raises(SettingsError) as refused:
        load(given(line))
    return str(refused.value)


def policy(settings: Settings) -> PlacementPolicy:
    return make_policy(settings.policy_name, settings.policy_number)


# --- What is accepted ----------------------------------------------------------------------------


def test_settings_that_are_valid_already_are_kept() -> None:
    settings = load({"port": 9000})
    assert load(settings) is settings


@pytest.mark.parametrize("given", [3, "3", " 3 ", {"replicas": 3}, {"replicas": "3"}])
def test_a_bare_number_is_the_number_of_replicas(given: Any) -> None:
    settings = load({"decoders": given})
    assert settings.decoders.replicas == 3
    assert settings.decoders.num_gpus == 1
    with pytest.raises(SettingsError, match=r"^decoders\.replicas: give"):
        load({"decoders": -1})


def test_dotted_names_reach_everything_from_a_command_line() -> None:
    settings = load(
        {
            "decoders.num_cpus": "2",
            "decoders": "3",
            "engine.max_model_len": "8192",
            "engine.dtype": "bfloat16",
            "prefillers.engine.enforce_eager": "true",
            "decoders.env.OMP_NUM_THREADS": "4",
            "decoders.tier": "8",
            "lmcache.size_gb": "1.5",
            "lmcache": {"port": "7000"},
        }
    )
    assert (settings.decoders.replicas, settings.decoders.num_cpus) == (3, 2)
    assert settings.engine == {"max_model_len": 8192, "dtype": "bfloat16"}
    assert settings.prefillers.engine == {"enforce_eager": True}
    # An environment variable is text, even where it looks like a number; so is a tier.
    assert settings.decoders.env == {"OMP_NUM_THREADS": "4"}
    assert settings.decoders.tier == "8"
    assert (settings.lmcache.size_gb, settings.lmcache.port) == (1.5, 7000)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "conserve-embedded"),
        ("model=embedded-vision", "conserve-embedded-vision"),
        ("model=Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("model=/models/q served_model_name=q", "q"),
        ("served_model_name=mine", "mine"),
    ],
)
def test_the_name_clients_ask_for(line: str, name: str) -> None:
    assert load(given(line)).model_id == name


def test_they_survive_a_config_file() -> None:
    engine = {"max_num_seqs": 64, "compilation_config": {"level": 3}}
    role = {"replicas": 3, "tier": "h100", "env": {"OMP_NUM_THREADS": "1"}, "engine": engine}
    settings = load({"decoders": role, "engine": {"seed": 1}, "lmcache": {"size_gb": 20}})
    assert (settings.decoders.env, settings.decoders.engine) == (role["env"], engine)
    assert (settings.decoders.tier, settings.lmcache.size_gb) == ("h100", 20)
    assert load(json.loads(settings.model_dump_json())) == settings


def test_every_setting_is_described() -> None:
    def fields(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        parts = [schema, *schema.get("$defs", {}).values()]
        return [item for part in parts for item in part["properties"].items()]

    described = fields(Settings.model_json_schema())
    assert len(described) > 20
    for name, field in described:
        assert field.get("description", "").endswith("."), name


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "decoders.engine.kv_cache_dtype=fp8",
            "decoders.engine.kv_cache_dtype: fp8, but prefillers have the default: KV is taken as "
            "it was stored, and LMCache's keys do not say in which form that is; set "
            "engine.kv_cache_dtype for both roles",
        ),
        (
            "decoders.engine.pipeline_parallel_size=2",
            "decoders.engine.pipeline_parallel_size: 2, but prefillers have the default: LMCache's "
            "keys say among how many workers KV is split, so a decoder would find nothing",
        ),
        (
            "decoders.engine.revision=v2",
            "decoders.engine.revision: v2, but prefillers have the default: a conversation would "
            "begin with one model and go on with another",
        ),
        (
            'decoders.engine.speculative_config={"method":"eagle3","model":"d"}',
            "decoders.engine.speculative_config: another value, but prefillers have the default: a "
            "drafter has KV of its own",
        ),
        (
            "prefillers.env.VLLM_MLA_DISABLE=1",
            "prefillers.env.VLLM_MLA_DISABLE: 1, but decoders have the default",
        ),
    ],
)
def test_roles_that_could_not_read_each_others_kv_are_refused(line: str, said: str) -> None:
    message = refusal(line)
    assert said in message
    assert len(message.splitlines()) == 1


_LANE = "engine_scheduler=conversation_lane"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # A value that is none.
        ("placement=conversation:-1", "placement: give conversation:TOKENS"),
        ("placement=elastic:1", "placement: elastic takes no number"),
        ("placement=per_turn:1.5", "placement: give per_turn:SHARE"),
        ("tracing.endpoint=collector:4318", "tracing.endpoint: give a URL"),
        ("tracing.endpoint=http://me:secret@collector", "tracing.endpoint: settings are no secret"),
        ("port=7610", "port: 7610 is the LMCache server's"),
        ("port=8000 port.number=3", "port: give"),
        ("media.tower_layers=0", "media.tower_layers: give a whole number from 1 on"),
        # Numbers that the layout is computed with.
        (
            "decoders.engine.tensor_parallel_size=0",
            "decoders.engine.tensor_parallel_size: give a whole number from 1 on",
        ),
        (
            "engine.gpu_memory_utilization=0,9",
            "engine.gpu_memory_utilization: give a number above 0, and at most 1",
        ),
        # Encoders that would encode for nothing.
        ("encoders.max_replicas=2", "encoders.max_replicas: encoders do not scale; set"),
        (
            "encoders=1 media.encoded_gb=0",
            "encoders: media.encoded_gb is 0, so other engines get no images from them; set it",
        ),
        (
            "encoders=1 tiers.slow.sm_slots=3 encoders.tier=slow",
            "encoders.tier: 'slow' has sm_slots, which encoders cannot keep to",
        ),
        (
            "encoders=1 encoders.engine.dtype=float32",
            "encoders.engine.dtype: float32, but decoders have the default, which would make "
            "something else of an image; set engine.dtype for all roles",
        ),
        ("encoders=1 encoders.engine.model=m", "encoders.engine.model cannot be set"),
        ("encoders.num_gpus=0.5 gpus=2", "encoders.num_gpus: gpus lays engines out"),
        # Settings that the chosen placement or scheduler would ignore.
        ("placement=collocated prefillers=1", "prefillers: placement collocated has none"),
        ("lmcache.disk.path=/kv pausing=off", "with pausing alone"),
        ("lmcache.disk.path=kv", "give the folder's whole path"),
        ("placement=per_turn pausing=on", "has prefillers go on with histories"),
        ("decoders=0", "decoders: give at least 1"),
        ("tpot_bound_s=0.03", "tpot_bound_s: set engine_scheduler=conversation"),
        (
            "engine_scheduler=conversation decoders.engine.scheduling_policy=fcfs",
            "decoders.engine.scheduling_policy cannot be set: engine_scheduler=conversation",
        ),
        (
            f"{_LANE} engine.tensor_parallel_size=2",
            f"engine.tensor_parallel_size cannot be set with {_LANE}: the lane has one worker",
        ),
        # Scaling by what is not known.
        (
            "placement=conversation prefillers.max_replicas=2",
            "prefillers scale by the profiled curve; set profile",
        ),
        (
            "placement=full_disaggregation prefillers.max_replicas=2 profile=a40-qwen3-0.6b",
            "only with placement conversation",
        ),
        ("decoders.replicas=3 decoders.max_replicas=2", "decoders.max_replicas: 2 is fewer"),
        # What GPUs cannot be.
        ("gpus=1 device=cpu", "gpus: device is cpu"),
        ("gpus=1 decoders.num_gpus=1", "decoders.num_gpus: gpus lays engines out"),
        ("gpus=1 decoders.tier=a", "gpus: with decoders.tier"),
        ("engine.enable_sleep_mode=true", "engine.enable_sleep_mode cannot be set"),
        (
            "decoders.env.PYTORCH_ALLOC_CONF=a:1,expandable_segments:True",
            "decoders.env.PYTORCH_ALLOC_CONF cannot have expandable_segments:True: memory of that",
        ),
        (
            "decoders.engine.enable_cumem_allocator=true",
            "decoders.engine.enable_cumem_allocator cannot be set: memory of vLLM's own allocator",
        ),
        # Keys and certificates that nothing needs, or that lack a part.
        ("keys_file=keys.json unauthenticated=true", "give one of both"),
        ("tls.cert_file=x.pem", "tls.key_file: set it beside tls.cert_file, or leave both out"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(line: str, said: str) -> None:
    message = refusal(line)
    assert said in message
    assert len(message.splitlines()) == 1


def test_there_are_no_encoders_unless_they_are_asked_for() -> None:
    assert load({"media.encoded_gb": 0}).encoders.replicas == 0
    settings = load({"encoders": "2", "encoders.num_cpus": 1, "encoders.engine.max_num_seqs": 4})
    assert (settings.encoders.replicas, settings.encoders.num_cpus) == (2, 1)
    assert not settings.hosts("encoder")
    assert settings.of_role("encoder") is settings.encoders


def test_adapters_are_settings_of_the_model_and_no_arguments_of_vllm() -> None:
    for name in ("lora_modules", "default_mm_loras"):
        assert f"engine.{name} cannot be set: use `adapters`" in refusal(f"engine.{name}=[]")
    assert load(given("adapters.sql=a")).adapters == {"sql": os.path.abspath("a")}
    assert load(given("adapters_file=a.json")).adapts
    assert not load({}).adapts
    assert "is no name for an adapter" in refusal("adapters.a@b=/a")
    assert "is a name of the model" in refusal("adapters.m=/a served_model_name=m")
    assert "adapters cannot be set with" in refusal("adapters.a=/a engine_scheduler=lane")


@pytest.mark.parametrize(
    "line",
    [
        "engine.kv_cache_dtype=fp8 engine.dtype=bfloat16 engine.block_size=32",
        "decoders.engine.dtype=half prefillers.engine.dtype=float16",
        "decoders.engine.kv_cache_dtype=fp8 prefillers.engine.kv_cache_dtype=fp8_e4m3",
        # An allocator that is off is no matter.
        "engine.enable_sleep_mode=false",
        # Neither has KV of a drafter.
        'decoders.engine.speculative_config={"method":"ngram","num_speculative_tokens":3}',
        # Nothing of these is in KV, or in its keys.
        "decoders.engine.gpu_memory_utilization=0.8 decoders.engine.max_num_seqs=64",
        # One role has nothing to agree with.
        "placement=collocated decoders.engine.kv_cache_dtype=fp8 decoders.engine.block_size=32",
    ],
)
def test_roles_may_differ_in_the_rest(line: str) -> None:
    assert load(given(line))


def test_a_placement_brings_its_policy_and_its_engines() -> None:
    assert isinstance(policy(load(None)), ElasticPlacement)
    assert load(None).prefillers_host
    paper = load({"placement": "conversation"})
    assert policy(paper) == ConversationPlacement()
    assert not paper.prefillers_host
    assert policy(load({"placement": "conversation:9"})) == ConversationPlacement(9)
    assert policy(load({"placement": "collocated"})) == CollocatedPlacement()
    per_turn = policy(load({"placement": "per_turn:1"}))
    assert per_turn.prefill_later_turn([Prefiller("p")]) == "p"
    pausing = room_policies(20, pauses=True).pausing
    assert pausing is not None
    assert (pausing.mark, pausing.patience_s) == (1.0, 50 / 3)
    assert patience_s(900) == patience_s(300) == 50.0


@pytest.mark.parametrize("like", LIKE)
def test_a_papers_system_is_a_set_of_settings_that_others_come_before(like: str) -> None:
    chosen = load({"like": like})
    assert chosen == load({**LIKE[like], "like": like})
    assert load({"like": like, "prefillers": 2, "decoders": 3, "pausing": True}).parks
    nested = load({"like": like, "prefillers.num_cpus": 2})
    assert nested.prefillers.replicas == chosen.prefillers.replicas


@pytest.mark.parametrize(
    ("line", "parks", "moves", "prefillers"),
    [
        ("", True, True, 1),
        ("placement=elastic pausing=off", False, False, 1),
        ("placement=conversation", True, False, 1),
        ("placement=full_disaggregation", False, False, 1),
        ("placement=per_turn:1 prefillers=2", False, False, 2),
        ("placement=collocated pausing=off", False, False, 0),
        ("prefillers=0 decoders=2", True, True, 0),
    ],
)
def test_turns_park_where_conversations_are_paused_and_move_where_others_can_read_them(
    line: str, parks: bool, moves: bool, prefillers: int
) -> None:
    settings = load(given(line))
    assert (settings.parks, settings.moves_turns) == (parks, moves)
    assert settings.prefiller_replicas == prefillers
    assert not (settings.prefillers_host and not prefillers)


@pytest.mark.parametrize(
    "name", ["model", "served_model_name", "kv_transfer_config", "enable_prefix_caching"]
)
@pytest.mark.parametrize("place", ["engine", "prefillers.engine", "decoders.engine"])
def test_what_conserve_decides_cannot_be_given_to_engines(place: str, name: str) -> None:
    assert f"{place}.{name} cannot be set" in refusal(f"{place}.{name}=x")


@pytest.mark.parametrize(
    "arguments",
    [
        {"decoders": {"env": {"HF_TOKEN": ["hf_secret"]}}},
        {"decoders": "hf_secret"},
        {"engine": "hf_secret"},
        {"engine": {"kv_transfer_config": "hf_secret"}},
        {"device": "hf_secret"},
        {"prefillers": {"tier": "hf_secret!"}},
    ],
)
def test_a_value_is_never_repeated(arguments: dict[str, Any]) -> None:
    """It may be a secret, and the message goes to logs."""
    with pytest.raises(SettingsError) as refused:
        load(arguments)
    assert "hf_secret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


# --- Who may reach it ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway"])
def test_an_open_address_wants_keys_or_an_explicit_word(host: str) -> None:
    message = refusal(f"host={host}")
    assert "conserve keys add" in message
    assert "keys_file" in message
    assert "unauthenticated=true" in message
    assert load({"host": host, "unauthenticated": "true"}).unauthenticated
    assert load({"host": host, "keys_file": "/keys.json"}).keys_file == "/keys.json"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_wants_neither(host: str) -> None:
    assert load({"host": host}).host == host


def test_the_key_file_is_found_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers have working directories of their own."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir("/usr")
    assert load({"keys_file": "keys.json"}).keys_file == "/usr/keys.json"
    assert load({"keys_file": "~/keys.json"}).keys_file == "/home/somebody/keys.json"


def test_a_certificate_makes_the_address_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    assert (load({}).scheme, load({}).tls.files) == ("http", None)
    secured = load({"tls.cert_file": "tls.crt", "tls.key_file": "tls.key"})
    assert (secured.scheme, secured.tls.files) == ("https", ("/usr/tls.crt", "/usr/tls.key"))


@pytest.mark.parametrize(
    "line",
    [
        "placement=conversation engine.tensor_parallel_size=1 "
        "prefillers.engine.tensor_parallel_size=2",
        "tiers.some.sm_slots=5 decoders.tier=some",
    ],
)
def test_a_lane_is_for_decoders_with_one_worker_and_may_have_sm_slots(line: str) -> None:
    assert "lane" in load(given(f"{_LANE} {line}")).mechanisms
