"""The metrics of engines: their work, schedulers and GPUs, as engines last told of them."""

from collections.abc import Callable, Iterable
from typing import Any

from conserve.engine_scheduling import SchedulerLoad
from conserve.placement.load import EngineLoad
from deployments.messages import EngineInfo
from deployments.table.metrics import COUNTER, GAUGE, Row, Samples
from deployments.table.registry import Registry
from hetero.energy import PHASES, EnergyBook, GpuReading


def _loads(read: Callable[[EngineLoad], float | None]) -> Callable[[Registry], Samples]:
    """Read a value from each engine's load; None where an engine does not know it."""

    def samples(registry: Registry) -> Samples:
        engines = registry.engines
        values = ((engines[id_], read(load)) for id_, load in registry.loads.items())
        return [(one.id, one.role, value) for one, value in values if value is not None]

    return samples


def _text_tokens(registry: Registry) -> Samples:
    return [
        (engine_id, registry.engines[engine_id].role, source, tokens)
        for engine_id, load in registry.loads.items()
        if load.new_text_tokens
        for source, tokens in (("kept", load.kept_text_tokens), ("new", load.new_text_tokens))
    ]


def _slots(read: Callable[[EngineInfo], int]) -> Callable[[Registry], Samples]:
    def samples(registry: Registry) -> Samples:
        engines = [one for one in registry.engines.values() if one.sm_slots]
        return [(one.id, one.role, read(one)) for one in engines] or None

    return samples


def _scheduler(
    kind: Any, name: str, help: str, label: str | None, read: Callable[[SchedulerLoad], Any]
) -> Row[Registry]:
    """Return a metric of engines' schedulers.

    Args:
        label: tells an engine's several values apart, which `read` gives as a list or dict.
        read: gives None where a scheduler has no such value.
    """

    def samples(registry: Registry) -> Samples:
        found: list[tuple[Any, ...]] = []
        for engine_id, load in registry.schedulers.items():
            value = read(load)
            if value is None:
                continue
            if not label:
                found.append((engine_id, value))
                continue
            by_key = value.items() if isinstance(value, dict) else enumerate(value)
            found += [(engine_id, key, one) for key, one in by_key]
        return found or None

    labels = ("engine", label) if label else ("engine",)
    return Row(kind, f"conserve_engine_{name}", help, labels, samples)


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
        COUNTER, "conserve_engine_text_tokens",
        "Tokens of prompts' text, by whether an engine had tokenized it before (kept) or not.",
        (*_ENGINE, "source"), _text_tokens,
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
    _scheduler(
        GAUGE, "waiting", "Calls that wait in an engine, by level; 0 goes first.",
        "level", lambda load: load.waiting,
    ),
    _scheduler(
        GAUGE, "running", "Calls that run in an engine, by level.",
        "level", lambda load: load.running,
    ),
    _scheduler(
        GAUGE, "running_kinds", "Calls that run: cold prefills, resumed ones, and decodes.",
        "kind", lambda load: load.running_kinds,
    ),
    _scheduler(
        COUNTER, "begun", "Calls that began to run, by their kind at that time.",
        "kind", lambda load: load.begun,
    ),
    _scheduler(
        COUNTER, "cut", "Prefill chunks that were made smaller, or put off, for decodes.",
        "kind", lambda load: load.cut,
    ),
    _scheduler(
        COUNTER, "preempted", "Calls that were preempted, by level.",
        "level", lambda load: load.preempted,
    ),
    _scheduler(
        COUNTER, "parts", "Prompts that began without room for all of them.",
        None, lambda load: load.parts,
    ),
    _scheduler(
        COUNTER, "reclaimed_blocks", "Blocks kept between turns that were given up early.",
        None, lambda load: load.reclaimed_blocks,
    ),
    _scheduler(
        GAUGE, "pinned_blocks", "Blocks that are kept between turns.",
        None, lambda load: load.pinned_blocks,
    ),
    _scheduler(
        GAUGE, "free_blocks", "Unused blocks; what is cached in them may be evicted.",
        None, lambda load: load.free_blocks,
    ),
    _scheduler(
        GAUGE, "tpot_seconds",
        "Recent time per output token while prefills and decodes share steps.",
        None, lambda load: load.tpot_s,
    ),
    _scheduler(
        GAUGE, "tpot_bound_seconds",
        "Bound that conserve_engine_tpot_seconds is kept below by cutting prefills.",
        None, lambda load: load.tpot_bound_s,
    ),
    _scheduler(
        GAUGE, "prefill_budget_tokens", "Tokens that a step may prefill beside decodes.",
        None, lambda load: load.budget_tokens,
    ),
    _scheduler(
        GAUGE, "lane_waiting", "Calls that wait for the prefill lane.",
        None, lambda load: load.lane_waiting,
    ),
    _scheduler(
        GAUGE, "lane_running", "Calls whose prompt is computed in the prefill lane.",
        None, lambda load: load.lane_running,
    ),
    _scheduler(
        GAUGE, "lane_tokens", "Tokens that are left to compute in the prefill lane.",
        None, lambda load: load.lane_tokens,
    ),
    _scheduler(
        COUNTER, "lane_prefills",
        "Prefills that were in the lane: done, or failed and computed inline.",
        "outcome", lambda load: load.lane_prefills,
    ),
    _scheduler(
        COUNTER, "lane_computed_tokens", "Prompt tokens that were computed in the prefill lane.",
        None, lambda load: load.lane_computed_tokens,
    ),
    _scheduler(
        GAUGE, "decode_sms",
        "SMs that an engine's steps have; its prefill lane has the others of its slots.",
        None, lambda load: load.decode_sms,
    ),
)  # fmt: skip


# --- energy ---------------------------------------------------------------------------------------


def _if_any(read: Callable[[EnergyBook], Samples]) -> Callable[[EnergyBook], Samples]:
    """Leave a metric out where there is no GPU."""
    return lambda book: read(book) if book.engines or book.joules else None


def _each_gpu(book: EnergyBook) -> Iterable[tuple[GpuReading, tuple[str, str, str]]]:
    """Return each GPU once, with its labels; of engines that share it, the first has it."""
    gpus = {
        gpu.uuid: (gpu, (gpu.uuid, engine.role, engine.tier))
        for engine in reversed(book.engines.values())
        for gpu in engine.latest.gpus
    }
    return gpus.values()


def _gpu(name: str, help: str, read: Callable[[GpuReading], float | None]) -> Row[EnergyBook]:
    def samples(book: EnergyBook) -> Samples:
        values = ((*labels, read(gpu)) for gpu, labels in _each_gpu(book))
        return [sample for sample in values if sample[-1] is not None]

    return Row(GAUGE, f"conserve_gpu_{name}", help, ("gpu", "role", "tier"), _if_any(samples))


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
        _if_any(
            lambda book: [
                (*labels, gpu.refusal, 1) for gpu, labels in _each_gpu(book) if gpu.refusal
            ]
        ),
    ),
    Row(
        COUNTER, "conserve_gpu_energy_joules",
        "Energy of the GPUs of each role, and so of its phase, idle time included.",
        ("role", "phase", "tier"),
        _if_any(
            lambda book: [
                (role, PHASES[role], tier, joules) for (role, tier), joules in book.joules.items()
            ]
        ),
    ),
    Row(
        GAUGE, "conserve_gpu_energy_integrated",
        "1 where a GPU has no energy counter, so that power samples were integrated.",
        (), _if_any(lambda book: any(one.latest.integrated for one in book.engines.values())),
    ),
    Row(
        COUNTER, "conserve_computed_tokens",
        "Tokens prefilled (not found in a cache) or decoded on GPUs whose energy is known.",
        ("tier",), _if_any(lambda book: [(tier, use.tokens) for tier, use in book.tiers.items()]),
    ),
    Row(
        GAUGE, "conserve_tier_tokens_per_joule",
        "Tokens that a tier's engines prefilled or decoded, for each joule of its GPUs.",
        ("tier",),
        _if_any(
            lambda book: [
                (tier, use.tokens_per_j)
                for tier, use in book.tiers.items()
                if use.tokens_per_j is not None
            ]
        ),
    ),
    Row(
        GAUGE, "conserve_tokens_per_joule",
        "Tokens that engines prefilled or decoded, for each joule of their GPUs.",
        (), _if_any(lambda book: book.overall.tokens_per_j),
    ),
)  # fmt: skip
