"""What the application is going to be on GPUs, for people: `conserve serve` and its `--plan`."""

import os

import typer
from rich.markup import escape
from rich.table import Table

from conserve.console import new_console
from conserve.settings import Settings, SettingsError
from hetero.gpu_plan import GpuNode, GpuPlan, gib

console = new_console()


def looked_at(settings: Settings) -> tuple[Settings, GpuPlan] | None:
    """What the settings come to on this machine's GPUs, or the cluster's; None without GPUs.

    Raises:
        typer.Exit: the engines have no place there, which is said; the exit status is 2.
    """
    if settings.device == "cpu":
        return None
    # What follows takes a second to load.
    from deployments.gpu_plans import here, plan_on

    nodes = _of_cluster() if os.environ.get("RAY_ADDRESS") else [here()]
    if not any(node.offer.resources.get("GPU") for node in nodes) and settings.device == "auto":
        return None
    try:
        return plan_on(settings, nodes)
    except SettingsError as error:
        console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise typer.Exit(2) from None


def show(settings: Settings, plan: GpuPlan) -> None:
    """Print the plan."""
    names = [card.name for card in plan.cards]
    kinds = [
        f"{names.count(card.name)} x {card.name} ({gib(card.memory_bytes)} GiB)"
        for card in dict.fromkeys(plan.cards)
    ]
    title = ", ".join(dict.fromkeys(kinds)) or f"{plan.gpus} GPUs that cannot be looked at"
    table = Table(title=f"{escape(settings.model_id)} on {escape(title)}, GiB of a GPU")
    table.add_column("engines")
    slots = any(one.sm_slots is not None for one in plan.engines)
    columns = ["GPUs", *(["SM slots"] if slots else []), "weights", "reserve", "KV", "tokens each"]
    for column in columns:
        table.add_column(column, justify="right")
    estimated = False
    for one in plan.engines:
        about = "" if one.fixed or one.kv_bytes is None else "~"
        estimated = estimated or bool(about)
        needs = one.needs
        each = f"{one.num_gpus:g}" if one.workers == 1 else f"{one.workers} x {one.num_gpus:g}"
        table.add_row(
            f"{one.replicas} {one.role}{'s' if one.replicas > 1 else ''}",
            each,
            *(["all" if one.sm_slots is None else f"{one.sm_slots} of 10"] if slots else []),
            gib(needs.weights_bytes) if needs else "?",
            gib(needs.reserve_bytes) if needs else "?",
            "?" if one.kv_bytes is None else about + gib(one.kv_bytes),
            "?" if one.kv_tokens is None else f"{about}{one.kv_tokens:,}",
        )
    console.print(table, highlight=False)
    if estimated:
        console.print("~: estimated; an engine with GPUs of its own measures when it starts.")
    kept = "" if plan.kept_tokens is None else f": at least {plan.kept_tokens:,} tokens"
    console.print(f"Host memory for handoffs: {plan.size_gb:g} GiB a node{kept}.", highlight=False)
    for note in plan.notes:
        console.print(f"[yellow]{escape(note)}[/yellow]", highlight=False)


def without_gpus(settings: Settings) -> None:
    """Print what there is to say where engines run on CPUs."""
    console.print(
        f"No GPU: {settings.prefiller_replicas} prefillers and {settings.decoders.replicas} "
        "decoders run on the CPU, each with the KV space of VLLM_CPU_KVCACHE_SPACE (1 GiB). Host "
        f"memory for handoffs: {settings.lmcache.size_gb:g} GiB a node.",
        highlight=False,
    )


def _of_cluster() -> list[GpuNode]:
    import ray

    from deployments.gpu_nodes import nodes_with_gpus

    ray.init(namespace="serve", log_to_driver=False, logging_level="warning")
    try:
        return nodes_with_gpus()
    finally:
        ray.shutdown()
