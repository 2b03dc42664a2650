"""The metrics of engines: their work, schedulers and GPUs, as engines last told of them."""

from collections.abc import Callable, Iterable
from typing import Any

from conserve.placement.load import EngineLoad
from deployments.messages import EngineInfo
from deployments.table.metrics import COUNTER, GAUGE, Row, Samples
from deployments.table.registry import Registry
from hetero.energy import PHASES, EnergyBook, GpuReading


def _loads(read: Callable[[EngineLoad], float | None]) -> Callable[[Registry], Samples]:
    return lambda registry: [
        (engine_id, engine.info.role, read(engine.load))
        for engine_id, engine in registry.engines.items()
        if engine.load is not None
    ]


def _text_tokens(registry: Registry) -> Samples:
    return [
        (engine_id, engine.info.role, source, tokens)
        for engine_id, engine in registry.engines.items()
        if (load := engine.load) is not None and load.new_text_tokens
        for source, tokens in (("kept", load.kept_text_tokens), ("new", load.new_text_tokens))
    ]


def _slots(read: Callable[[EngineInfo], int]) -> Callable[[Registry], Samples]:
    return lambda registry: [
        (one.id, one.role, read(one)) for one in registry.infos if one.sm_slots
    ]


def _scheduler(
    kind: Any, name: str, help: str, label: str | None = None, field: str | None = None
) -> Row[Registry]:
    """Return a metric of engines' schedulers; ``label`` tells apart the values of a list or a dict.

    ``field`` is of `SchedulerLoad`, by default as the metric. Where it is None, there is no value.
    """

    def samples(registry: Registry) -> Samples:
        found: list[tuple[Any, ...]] = []
        for engine_id, engine in registry.engines.items():
            # None where it has no such scheduler, too.
            value = getattr(engine.scheduler, field or name, None)
            if value is None:
                continue
            if not label:
                found.append((engine_id, value))
                continue
            by_key = value.items() if isinstance(value, dict) else enumerate(value)
            found += [(engine_id, key, one) for key, one in by_key]
        return found

    labels = ("engine", label) if label else ("engine",)
    return Row(kind, f"conserve_engine_{name}", help, labels, samples)


def _found(registry: Registry) -> Samples:
    checks = [(one.id, one.cache_check) for one in registry.infos if one.cache_check is not None]
    of = ("sent", "again", "appended", "host")
    return [(id_, name, getattr(one, f"{name}_tokens")) for id_, one in checks for name in of]


_ENGINE = ("engine", "role")

ENGINES: tuple[Row[Registry], ...] = (
    Row(
        GAUGE, "conserve_engine_prefill_tokens",
        "Prompt tokens that an engine still has to compute, without those that caches should have.",
        _ENGINE, _loads(lambda load: load.prefill_tokens),
    ),
    Row(
        GAUGE, "conserve_engine_decodes", "Requests past their first token.",
        _ENGINE, _loads(lambda load: load.decodes),
    ),
    Row(
        GAUGE, "conserve_engine_step_seconds",
        "Mean duration of an iteration without a prefill, over 30 s.",
        _ENGINE, _loads(lambda load: load.step_s or None),
    ),
    Row(
        GAUGE, "conserve_engine_prefill_tokens_per_second",
        "Speed at which an engine computed prompts while it had any, over 30 s.",
        _ENGINE, _loads(lambda load: load.prefill_tokens_per_s or None),
    ),
    Row(
        COUNTER, "conserve_engine_load_failures",
        "Loads of KV that took too long, and for which a node's LMCache server was killed.",
        _ENGINE, _loads(lambda load: load.overdue_loads),
    ),
    Row(
        COUNTER, "conserve_engine_text_tokens",
        "Tokens of prompts' text, by whether an engine had tokenized it before (kept) or not.",
        (*_ENGINE, "source"), _text_tokens,
    ),
    Row(
        GAUGE, "conserve_engine_cache_check_tokens",
        "Tokens of the prompt that an engine ran before it was ready: sent, and found when it came "
        "again, came again with more behind it (appended), or was taken from host memory (host).",
        ("engine", "found"), _found,
    ),
    Row(
        GAUGE, "conserve_engine_sm_slots",
        "Tenths of its GPU's SMs that an engine has to itself.",
        _ENGINE, _slots(lambda engine: engine.sm_slots),
    ),
    Row(
        GAUGE, "conserve_engine_sms", "SMs that an engine has to itself.",
        _ENGINE, _slots(lambda engine: engine.sms),
    ),
)  # fmt: skip
SCHEDULERS: tuple[Row[Registry], ...] = (
    _scheduler(GAUGE, "waiting", "Calls that wait in an engine, by level; 0 goes first.", "level"),
    _scheduler(GAUGE, "running", "Calls that run in an engine, by level.", "level"),
    _scheduler(
        GAUGE, "running_kinds", "Calls that run: cold prefills, resumed ones, and decodes.", "kind"
    ),
    _scheduler(COUNTER, "begun", "Calls that began to run, by their kind at that time.", "kind"),
    _scheduler(
        COUNTER, "cut", "Prefill chunks that were made smaller, or put off, for decodes.", "kind"
    ),
    _scheduler(COUNTER, "preempted", "Calls that were preempted, by level.", "level"),
    _scheduler(COUNTER, "parts", "Prompts that began without room for all of them."),
    _scheduler(COUNTER, "reclaimed_blocks", "Blocks kept between turns that were given up early."),
    _scheduler(GAUGE, "pinned_blocks", "Blocks that are kept between turns."),
    _scheduler(GAUGE, "free_blocks", "Unused blocks; what is cached in them may be evicted."),
    _scheduler(
        GAUGE, "tpot_seconds",
        "Recent time per output token while prefills and decodes share steps.", field="tpot_s",
    ),
    _scheduler(
        GAUGE, "tpot_bound_seconds",
        "Bound that conserve_engine_tpot_seconds is kept below by cutting prefills.",
        field="tpot_bound_s",
    ),
    _scheduler(
        GAUGE, "prefill_budget_tokens", "Tokens that a step may prefill beside decodes.",
        field="budget_tokens",
    ),
    _scheduler(GAUGE, "lane_waiting", "Calls that wait for the prefill lane."),
    _scheduler(GAUGE, "lane_running", "Calls whose prompt is computed in the prefill lane."),
    _scheduler(GAUGE, "lane_tokens", "Tokens that are left to compute in the prefill lane."),
    _scheduler(
        COUNTER, "lane_prefills",
        "Prefills that were in the lane: done, or failed and computed inline.", "outcome",
    ),
    _scheduler(
        COUNTER, "lane_computed_tokens", "Prompt tokens that were computed in the prefill lane."
    ),
    _scheduler(
        GAUGE, "decode_sms",
        "SMs that an engine's steps have; its prefill lane has the others of its slots.",
    ),
)  # fmt: skip


# --- energy ---------------------------------------------------------------------------------------


def _each_gpu(book: EnergyBook) -> Iterable[tuple[GpuReading, tuple[str, str, str]]]:
    """Return each GPU once, with its labels; of engines that share it, the first has it."""
    gpus = {
        gpu.uuid: (gpu, (gpu.uuid, engine.role, engine.tier))
        for engine in reversed(book.engines.values())
        for gpu in engine.latest.gpus
    }
    return gpus.values()


def _gpu(name: str, help: str, read: Callable[[GpuReading], float | None]) -> Row[EnergyBook]:
    return Row(
        GAUGE, f"conserve_gpu_{name}", help, ("gpu", "role", "tier"),
        lambda book: [(*labels, read(gpu)) for gpu, labels in _each_gpu(book)],
    )  # fmt: skip


ENERGY: tuple[Row[EnergyBook], ...] = (
    _gpu("power_watts", "Power of the board.", lambda gpu: gpu.draw_w),
    _gpu("power_limit_watts", "Power limit that is set.", lambda gpu: gpu.limit_w),
    _gpu("power_cap_watts", "Power cap that ConServe holds.", lambda gpu: gpu.cap_w),
    _gpu("utilisation", "Share of time in which a kernel ran, 0-1.", lambda gpu: gpu.utilisation),
    _gpu("temperature_celsius", "Temperature of the chip.", lambda gpu: gpu.temperature_c),
    Row(
        GAUGE, "conserve_gpu_power_cap_refused",
        "1 where a wanted cap does not hold, by reason; the node's log says what to do.",
        ("gpu", "role", "tier", "reason"),
        lambda book: [
            (*labels, gpu.refusal, 1) for gpu, labels in _each_gpu(book) if gpu.refusal
        ],
    ),
    Row(
        COUNTER, "conserve_gpu_energy_joules",
        "Energy of the GPUs of each role, and so of its phase, idle time included.",
        ("role", "phase", "tier"),
        lambda book: [
            (role, PHASES[role], tier, joules) for (role, tier), joules in book.joules.items()
        ],
    ),
    Row(
        GAUGE, "conserve_gpu_energy_integrated",
        "1 where a GPU has no energy counter, so that power samples were integrated.",
        (),
        lambda book: (
            any(one.latest.integrated for one in book.engines.values()) if book.engines else None
        ),
    ),
    Row(
        COUNTER, "conserve_computed_tokens",
        "Tokens prefilled (not found in a cache) or decoded on GPUs whose energy is known.",
        ("tier",), lambda book: [(tier, use.tokens) for tier, use in book.tiers.items()],
    ),
    Row(
        GAUGE, "conserve_tier_tokens_per_joule",
        "Tokens that a tier's engines prefilled or decoded, for each joule of its GPUs.",
        ("tier",), lambda book: [(tier, use.tokens_per_j) for tier, use in book.tiers.items()],
    ),
    Row(
        GAUGE, "conserve_tokens_per_joule",
        "Tokens that engines prefilled or decoded, for each joule of their GPUs.",
        (), lambda book: book.overall.tokens_per_j,
    ),
)  # fmt: skip
