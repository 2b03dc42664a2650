"""Checks what a start would, and shows the layout of engines, for `conserve serve`."""

import errno
import os
from collections.abc import Collection, Iterator

from rich.markup import escape
from rich.table import Table

from conserve.settings import EMBEDDED_MODELS, Settings, SettingsError
from conserve_cli.cluster import is_alone, require_ray
from conserve_cli.output import console, refuse
from hetero.cpu_plan import CpuPlan
from hetero.engine_needs import gib
from hetero.gpu_plan import GpuNode, GpuPlan
from hetero.tiers import missing
from hetero.vision_tower import TowerNeeds

# How far above a port that is taken a free one is looked for.
_LOOKED = 100


def examined(settings: Settings, *, planning: bool) -> tuple[Settings, GpuPlan | CpuPlan | None]:
    """Check what a start would; return the settings, laid out, and the plan of engines.

    The plan is None for CPUs of a cluster, which are not known. If a check fails, this ends the
    command with status 2 and a line for each problem.

    Args:
        planning: whether nothing will start, so that vLLM is asked about the model, too,
            which takes seconds; otherwise only about engine arguments that are given.
    """
    # These imports take a second.
    from deployments.gpu_plans import plan_on
    from deployments.start_checks import require_startable

    _require_cluster()
    problems: list[str] = []
    found: tuple[Settings, GpuPlan | CpuPlan | None] = (settings, None)
    if is_alone():
        try:
            require_startable(settings)
        except SettingsError as error:
            problems += error.problems
        problems += busy_ports(settings)
    nodes = _gpu_nodes(settings)
    try:
        if nodes is None:
            found = _on_cpus(settings)
        else:
            found = plan_on(settings, nodes, model_is_here=is_alone())
    except SettingsError as error:
        problems += error.problems
    absent = [name for name, own in settings.each.items() if not is_alone()
              or any(line.startswith(own.said("model:")) for line in problems)]  # fmt: skip
    problems += _refused_by_vllm(settings, nodes is not None, absent, planning)
    if problems:
        refuse("\n".join(dict.fromkeys(problems)))
    return found


def busy_ports(settings: Settings) -> Iterator[str]:
    """Yield a line for each port of the settings on which this user could not listen now."""
    from deployments.node.lmcache_server import refused

    lmcache = settings.lmcache
    taken = {settings.port, lmcache.port, lmcache.http_port}
    # On several nodes LMCache listens on its node's address.
    host = "0.0.0.0" if settings.nodes == "several" else "127.0.0.1"
    for setting, purpose, where, port in (
        ("port", "the router", settings.host, settings.port),
        ("lmcache.port", "LMCache's server", host, lmcache.port),
        ("lmcache.port", "LMCache's admin interface", "127.0.0.1", lmcache.http_port),
    ):
        number = refused(where, port) if port else None
        if number is None:
            continue
        # LMCache takes two in a row.
        needed = 1 if setting == "port" else 2
        free = _free_from(where, max(port, 1023) + 1, needed, taken)
        other = f"{setting}={free}" if free else "another"
        if number == errno.EADDRINUSE:
            yield (
                f"{setting}: {port}, for {purpose}, is in use here; stop what listens there, or "
                f"set {other}"
            )
        elif number in (errno.EACCES, errno.EPERM):
            yield f"{setting}: {port} is for privileged users (below 1024); set {other}"
        else:
            yield f"host: {where} is no address of this machine; give one that is, or 127.0.0.1"


def _free_from(host: str, first: int, count: int, taken: set[int]) -> int | None:
    from deployments.node.lmcache_server import is_free

    for port in range(first, min(first + _LOOKED, 65535)):
        ports = set(range(port, port + count))
        if not ports & taken and all(is_free(host, one) for one in ports):
            return port
    return None


def _gpu_nodes(settings: Settings) -> list[GpuNode] | None:
    """Return the nodes that engines on GPUs may have; None: they run on CPUs."""
    if settings.device == "cpu":
        return None
    from deployments.gpu_plans import here

    nodes = [here()] if is_alone() else _of_cluster()
    if not any(node.offer.resources.get("GPU") for node in nodes) and settings.device == "auto":
        return None
    return nodes


def _on_cpus(settings: Settings) -> tuple[Settings, CpuPlan | None]:
    from deployments.engine_arguments import require_one_split
    from deployments.gpu_plans import here, planned_on_cpus

    settings.for_each(require_one_split)
    if not is_alone():
        return settings, None
    absent = missing(settings, False, [here().offer])
    absent += [
        own.said(
            f"gpus: {own.gpus} are asked for, and this machine shows none; leave it out, or "
            "see `conserve doctor`"
        )
        for own in settings.each.values()
        if own.gpus is not None
    ]
    if absent:
        raise SettingsError(*absent)
    return planned_on_cpus(settings)


def _refused_by_vllm(
    settings: Settings, gpu: bool, absent: Collection[str], planning: bool
) -> list[str]:
    """Return why vLLM refuses the engine arguments or, where a start is planned, the models.

    ``absent`` are models that cannot be read here.
    """
    asked = [
        own for own in settings.each.values()
        if any(one.engine for one in (own, own.prefillers, own.decoders, own.encoders))
        or (planning and own.model not in EMBEDDED_MODELS)
    ]  # fmt: skip
    if not asked:
        return []
    from deployments.engine_arguments import VllmSilent, refused_arguments

    try:
        with console.status("asking vLLM"):
            return [
                own.said(line)
                for own in asked
                for line in refused_arguments(own, gpu, own.model_id not in absent)
            ]
    except VllmSilent as error:
        console.print(f"[yellow]vLLM cannot be asked about this: {escape(str(error))}[/yellow]")
        return []


def require_arguments(settings: Settings) -> None:
    """Have vLLM check the engine arguments for a cluster; end with status 2 if it refuses some."""
    _require_cluster()
    problems = _refused_by_vllm(settings, settings.device != "cpu", [*settings.each], False)
    if problems:
        refuse("\n".join(problems))


def show_plan(settings: Settings, plan: GpuPlan | CpuPlan | None) -> None:
    if isinstance(plan, GpuPlan):
        show(settings, plan)
    else:
        show_on_cpus(settings, plan)


def show(settings: Settings, plan: GpuPlan) -> None:
    names = [card.name for card in plan.cards]
    kinds = [
        f"{names.count(card.name)} x {card.name} ({gib(card.memory_bytes)} GiB)"
        for card in dict.fromkeys(plan.cards)
    ]
    title = ", ".join(dict.fromkeys(kinds)) or f"{plan.gpus} GPUs that cannot be looked at"
    models = f"{len(settings.models)} models" if settings.models else settings.model_id
    console.print(f"{escape(f'{models} on {title}')}, GiB of a GPU", highlight=False)
    table = Table(*(["model"] if settings.models else []), "engines")
    slots = any(one.sm_slots is not None for one in plan.engines)
    towers = [one.needs.tower for one in plan.engines if one.needs and one.needs.tower]
    columns = ["GPUs", *(["SM slots"] if slots else []), "weights", "reserve"]
    columns += [*(["encoder cache"] if towers else []), "KV", "tokens each"]
    for column in columns:
        table.add_column(column, justify="right")
    for one in plan.engines:
        about = "" if one.fixed or one.kv_bytes is None else "~"
        needs = one.needs
        each = f"{one.num_gpus:g}" if one.workers == 1 else f"{one.workers} x {one.num_gpus:g}"
        table.add_row(
            *([escape(one.model.strip())] if one.model else []),
            f"{one.replicas} {one.role}{'s' if one.replicas > 1 else ''}",
            each,
            *(["all" if one.sm_slots is None else f"{one.sm_slots} of 10"] if slots else []),
            gib(needs.weights_bytes) if needs else "?",
            gib(needs.reserve_bytes) if needs else "?",
            *([gib(needs.cache_bytes) if needs else "?"] if towers else []),
            "?" if one.kv_bytes is None else about + gib(one.kv_bytes),
            "?" if one.kv_tokens is None else f"{about}{one.kv_tokens:,}",
        )
    console.print(table, highlight=False)
    if any(not one.fixed and one.kv_bytes is not None for one in plan.engines):
        console.print("~: estimated; an engine with GPUs of its own measures when it starts.")
    if plan.sums:
        console.print(f"{plan.sums[0].upper()}{escape(plan.sums[1:])}.", highlight=False)
    console.print(f"{plan.roles[:1].upper()}{plan.roles[1:]}.", highlight=False)
    kept = "" if plan.kept_tokens is None else f": at least {plan.kept_tokens:,} tokens"
    there = f"; {plan.memory.said()}" if plan.memory else ""
    console.print(f"Host memory for KV: {plan.size_gb:g} GiB a node{kept}{there}.", highlight=False)
    _show_images(towers, plan.images)
    _show_bound(settings)
    for note in plan.notes:
        console.print(f"[yellow]{escape(note)}[/yellow]", highlight=False)


def show_on_cpus(settings: Settings, plan: CpuPlan | None) -> None:
    prefillers, decoders = settings.prefiller_replicas, settings.decoders.replicas
    engines = f"{prefillers} prefillers and {decoders} decoders run"
    if not prefillers:
        engines = (
            f"{decoders} decoders without a prefiller run" if decoders > 1 else "1 decoder runs"
        )
    said = f"No GPU: {engines} on the CPU"
    there = ""
    if plan is not None and settings.models:
        said = f"No GPU: {' + '.join(plan.terms)} = {gib(plan.taken_bytes)} GiB on the CPU"
    elif plan is not None:
        space = " or ".join(f"{one:g}" for one in dict.fromkeys(plan.kv_gb.values()))
        said += f", each with {space} GiB of KV space (VLLM_CPU_KVCACHE_SPACE)"
        if encoders := settings.encoders.replicas:
            said += f", beside {encoders} encoder{'s' if encoders > 1 else ''}"
        if plan.weights_bytes is not None:
            said += f" and all together {gib(plan.weights_bytes)} GiB of weights"
    if plan is not None:
        there = f"; {plan.memory.said()}"
        console.print(f"dtype: {escape(plan.dtype)}.", highlight=False)
    console.print(
        f"{said}. Host memory for KV: {settings.lmcache.size_gb:g} GiB a node{there}.",
        highlight=False,
    )
    _show_images([], "" if plan is None else plan.images)
    _show_bound(settings)


def _show_images(towers: list[TowerNeeds], in_host_memory: str) -> None:
    """Print what images take; nothing for a model that reads text only."""
    if towers:
        # An encoder keeps all of its layers.
        most = max(towers, key=lambda one: (bool(one.kept), one.encode_bytes))
        kept = f", with {most.kept} at a time" if most.kept else ""
        console.print(
            f"Images: the vision tower is {gib(most.weights_bytes)} GiB of the weights{kept}; "
            f"it encodes {most.batch} in some {gib(most.encode_bytes)} GiB of the reserve; the "
            f"encoder cache keeps {most.embeddings:,} embeddings.",
            highlight=False,
        )
    if in_host_memory:
        console.print(f"{in_host_memory[0].upper()}{in_host_memory[1:]}.", highlight=False)


def _show_bound(settings: Settings) -> None:
    for name, own in settings.each.items():
        if "chunks" in own.mechanisms:
            bound = "twice a step without prefills, as engines measure it"
            if own.tpot_bound_s is not None:
                bound = f"{1000 * own.tpot_bound_s:g} ms"
            of = f" ({escape(name)})" if own.models else ""
            console.print(f"TPOT above which prefills are cut{of}: {bound}.", highlight=False)


def _require_cluster() -> None:
    address = os.environ.get("RAY_ADDRESS", "")
    # Ray's client finds its own server, and says quickly where there is none.
    if address and "://" not in address:
        from deployments.joining import find_ray

        try:
            require_ray(address)
            find_ray(address)
        except ConnectionError as error:
            refuse(f"RAY_ADDRESS: no usable Ray at {address}: {error}")


def _of_cluster() -> list[GpuNode]:
    import ray

    from deployments.tier_nodes import nodes_with_gpus

    ray.init(namespace="serve", log_to_driver=False, logging_level="warning")
    try:
        return nodes_with_gpus()
    finally:
        ray.shutdown()
