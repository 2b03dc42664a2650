"""Checks of settings that depend on each other."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from conserve.addons import INSIDE, TOOLS, addon, missing
from conserve.loopback import is_loopback
from conserve.settings.engine_arguments import NOT_BESIDE_A_LANE, disagreements, encoders_disagree
from conserve.settings.groups import EnvironmentSettings, RoleSettings

if TYPE_CHECKING:
    from conserve.settings.application import Settings

# A line each, which begins with a setting's name and says what would be right.
Problems = Iterator[str]


def engines_for_all_turns(settings: "Settings") -> Problems:
    if not settings.decoders.replicas:
        yield "decoders: give at least 1; conversations live there"
    if not (settings.prefillers.replicas or settings.policy_class.keeps_later_turns):
        yield f"prefillers: give at least 1 with placement {settings.policy_name}"


def roles_read_each_others_kv(settings: "Settings") -> Problems:
    if settings.prefiller_replicas:
        yield from disagreements(
            settings.engine,
            settings.prefillers.engine,
            settings.decoders.engine,
            (settings.prefillers.env, settings.decoders.env),
        )


def encoders_have_a_use(settings: "Settings") -> Problems:
    if settings.encoders.max_replicas is not None:
        yield "encoders.max_replicas: encoders do not scale; set encoders.replicas"
    if not settings.encoders.replicas:
        return
    if not (settings.media.parts and settings.media.encoded_gb):
        name = "encoded_gb" if settings.media.parts else "parts"
        yield (
            f"encoders: media.{name} is 0, so other engines get no images from them; set it, "
            "or encoders=0"
        )
    tier = settings.tiers.get(settings.encoders.tier or "")
    if tier is not None and tier.sm_slots is not None:
        yield (
            f"encoders.tier: {settings.encoders.tier!r} has sm_slots, which encoders cannot keep "
            "to; give them another tier"
        )
    yield from encoders_disagree(
        settings.engine, settings.encoders.engine, settings.decoders.engine
    )


def adapters_have_their_engines(settings: "Settings") -> Problems:
    for name in {settings.model_id, *settings.aliases} & settings.adapters.keys():
        yield f"adapters: {name!r} is a name of the model itself; give the adapter another"
    if settings.adapts and "lane" in settings.mechanisms:
        yield (
            f"adapters cannot be set with engine_scheduler={settings.engine_scheduler}: "
            f"{NOT_BESIDE_A_LANE['enable_lora']}"
        )


def disk_gets_every_turn(settings: "Settings") -> Problems:
    if settings.lmcache.disk.path is not None and not settings.parks:
        yield "lmcache.disk: turns leave their KV in host memory with pausing alone; set pausing=on"


def gpus_are_laid_out_once(settings: "Settings") -> Problems:
    if settings.gpus is None:
        return
    if settings.device == "cpu":
        yield "gpus: device is cpu; leave one of the two out"
    if settings.tiers:
        yield "gpus: with tiers, say by num_gpus what engines get"
    for name in ("prefillers", "decoders", "encoders"):
        role: RoleSettings = getattr(settings, name)
        if role.tier is not None:
            yield f"gpus: with {name}.tier, say by num_gpus what engines get"
        if "num_gpus" in role.model_fields_set:
            yield f"{name}.num_gpus: gpus lays engines out; give one of the two"


def authentication_is_chosen(settings: "Settings") -> Problems:
    if settings.keys_file is not None and settings.unauthenticated:
        yield "unauthenticated: with keys_file, requests need keys; give one of both"
    if not (settings.keys_file or settings.unauthenticated or is_loopback(settings.host)):
        yield (
            f"host: whoever reaches {settings.host} could use everything, and end everybody's "
            "conversations; make keys (`conserve keys add NAME`) and set keys_file, or set "
            "unauthenticated=true where the network, or a gateway, keeps others out"
        )
    if (
        settings.environments.enabled
        and settings.unauthenticated
        and not is_loopback(settings.host)
    ):
        yield (
            f"environments.enabled: whoever reaches {settings.host} could run commands; make keys "
            "(`conserve keys add NAME`) and set keys_file in the place of unauthenticated"
        )


def certificate_has_its_key(settings: "Settings") -> Problems:
    for given, needed in (("cert_file", "key_file"), ("key_file", "cert_file")):
        if getattr(settings.tls, given) and not getattr(settings.tls, needed):
            yield f"tls.{needed}: set it beside tls.{given}, or leave both out"


def placement_has_its_settings(settings: "Settings") -> Problems:
    if not settings.policy_class.uses_prefillers and "prefillers" in settings.model_fields_set:
        yield "prefillers: placement collocated has none; set decoders alone"
    given = "pausing" in settings.model_fields_set
    if not settings.policy_class.pauses and settings.pausing and given:
        yield (
            f"pausing: placement {settings.policy_name} has prefillers go on with histories, and "
            "pauses none; leave it out"
        )


def addons_are_installed(settings: "Settings") -> Problems:
    for name, default in EnvironmentSettings():
        given = getattr(settings.environments, name)
        if given != default and addon(TOOLS) is None:
            yield missing(f"environments.{name}", TOOLS)
    if settings.runs_inside and addon(INSIDE) is None:
        yield from (missing(what, INSIDE) for what in settings.runs_inside)


def scheduler_has_its_arguments(settings: "Settings") -> Problems:
    if settings.tpot_bound_s is not None and "chunks" not in settings.mechanisms:
        yield "tpot_bound_s: set engine_scheduler=conversation, or one with chunks"
    if not settings.mechanisms:
        return
    for name, given in _engine_arguments(settings):
        for argument in ("scheduler_cls", "scheduling_policy"):
            if argument in given:
                yield (
                    f"{name}.{argument} cannot be set: "
                    f"engine_scheduler={settings.engine_scheduler} sets it"
                )


def lane_has_its_engine(settings: "Settings") -> Problems:
    if "lane" not in settings.mechanisms:
        return
    given = {f"engine.{name}": value for name, value in settings.engine.items()}
    for role in ("prefillers", "decoders") if settings.prefillers_host else ("decoders",):
        own: RoleSettings = getattr(settings, role)
        given |= {f"{role}.engine.{name}": value for name, value in own.engine.items()}
    for name, value in given.items():
        argument = name.rsplit(".", 1)[1]
        asked_for = value is True or value not in (None, False, 1)
        if argument in NOT_BESIDE_A_LANE and asked_for:
            why = NOT_BESIDE_A_LANE[argument]
            yield f"{name} cannot be set with engine_scheduler={settings.engine_scheduler}: {why}"


def router_has_its_port(settings: "Settings") -> Problems:
    if settings.port in (settings.lmcache.port, settings.lmcache.http_port):
        yield (
            f"port: {settings.port} is the LMCache server's, which takes lmcache.port and the next "
            "one; they must differ"
        )


def scaling_has_its_settings(settings: "Settings") -> Problems:
    for name, role in (("prefillers", settings.prefillers), ("decoders", settings.decoders)):
        if role.max_replicas is not None and role.max_replicas < role.replicas:
            yield (
                f"{name}.max_replicas: {role.max_replicas} is fewer than "
                f"{name}.replicas, {role.replicas}"
            )
    if settings.prefillers.max_replicas is not None:
        if settings.profile is None:
            yield "prefillers.max_replicas: prefillers scale by the profiled curve; set profile"
        if not settings.policy_class.only_first_prompts:
            yield (
                "prefillers.max_replicas: only with placement conversation, whose prefillers "
                "get first turns alone"
            )


def _engine_arguments(settings: "Settings") -> Iterator[tuple[str, dict[str, Any]]]:
    yield "engine", settings.engine
    yield "prefillers.engine", settings.prefillers.engine
    yield "decoders.engine", settings.decoders.engine


# In the order in which they are made: of several that fail, users hear of the first.
CHECKS: tuple[Callable[["Settings"], Problems], ...] = (
    engines_for_all_turns,
    roles_read_each_others_kv,
    encoders_have_a_use,
    adapters_have_their_engines,
    disk_gets_every_turn,
    gpus_are_laid_out_once,
    authentication_is_chosen,
    certificate_has_its_key,
    placement_has_its_settings,
    addons_are_installed,
    scheduler_has_its_arguments,
    lane_has_its_engine,
    router_has_its_port,
    scaling_has_its_settings,
)
