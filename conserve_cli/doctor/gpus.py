"""GPUs: driver, NVML, who has their memory, and what may be done with them."""

from conserve.settings import Settings
from conserve_cli.doctor.facts import CardFacts, GpuFacts, HolderFacts
from conserve_cli.doctor.findings import Finding, gibibytes
from hetero.gpu_layout import UTILISATION

# With less, there is no room for an engine of whatever share.
_LEAST_SHARE = 0.1


def check_gpus(
    facts: GpuFacts, settings: Settings, caps_power: bool, has_engines: bool = True
) -> list[Finding]:
    """Judge what NVML says of this node's GPUs.

    Args:
        caps_power: whether power caps are asked for here.
        has_engines: whether engines can be here at all.
    """
    if not facts.devices:
        if not has_engines:
            return [Finding("ok", "GPU", "none; no engine runs here")]
        if settings.device == "gpu":
            return [
                Finding(
                    "wrong", "GPU", "no NVIDIA device here, and device=gpu",
                    "give the container its GPUs, mend the driver, or set device=auto",
                )
            ]  # fmt: skip
        return [Finding("ok", "GPU", "none; engines run on the CPU")]
    if facts.problem:
        return [Finding("wrong", "GPU", "NVML cannot be used", facts.problem)]
    names = [card.name for card in facts.cards]
    named = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    runs = f"driver {facts.driver}, CUDA up to {facts.cuda[0]}.{facts.cuda[1]}"
    findings = [Finding("ok", "GPU", f"{named or 'none answers'}; {runs}")]
    findings += [
        Finding(
            "wrong", "GPU", f"GPU {index} does not answer: it fell off the bus",
            "see dmesg for its Xid; reset it or restart the machine",
        )
        for index in facts.lost
    ]  # fmt: skip
    if has_engines and settings.device != "cpu":
        for card in facts.cards:
            findings += _mig(card) if card.mig else []
            findings += [one for part in card.parts or (card,) for one in _memory(part)]
    if caps_power and not facts.may_cap_power:
        findings.append(
            Finding(
                "warning", "power", "this user may not change power limits: GPUs run uncapped",
                "run the node's Ray as root or with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN)",
            )
        )  # fmt: skip
    return findings


def _mig(card: CardFacts) -> list[Finding]:
    number = card.label.split()[-1]
    leave = f"leave the mode (nvidia-smi -i {number} -mig 0)"
    if not card.parts:
        return [
            Finding(
                "wrong", "MIG", f"{card.label} is in MIG mode and has no MIG device: no engine can "
                "use it", f"make one (nvidia-smi mig -i {number} -cgi ... -C), or {leave}",
            )
        ]  # fmt: skip
    if len(card.parts) == 1:
        size = gibibytes(card.parts[0].memory_bytes)
        return [Finding("ok", "MIG", f"{card.label} is in MIG mode, with one device of {size}")]
    sizes = ", ".join(gibibytes(part.memory_bytes) for part in card.parts)
    return [
        Finding(
            "warning", "MIG",
            f"{card.label} is in MIG mode, with {len(card.parts)} devices ({sizes}): CUDA shows a "
            "process one of them, so LMCache's server reaches no engine on another",
            "have all engines on one, by CUDA_VISIBLE_DEVICES=MIG-... before Ray starts; or "
            + leave,
        )
    ]  # fmt: skip


def _memory(card: CardFacts) -> list[Finding]:
    # vLLM does not start an engine where its share is not free.
    if card.mig or card.free_bytes >= UTILISATION * card.memory_bytes:
        return []
    free = f"{gibibytes(card.free_bytes)} of {gibibytes(card.memory_bytes)}"
    held = ", ".join(_held(one) for one in card.holders)
    seen = f"{card.label} has {free} free; {held or 'who has the rest cannot be seen from here'}"
    if card.holders and all(one.owner for one in card.holders):
        return [
            Finding(
                "note", "GPU memory", seen,
                "nothing, if that is the application; else end it before another starts",
            )
        ]  # fmt: skip
    full = card.free_bytes < _LEAST_SHARE * card.memory_bytes
    return [
        Finding(
            "wrong" if full else "warning", "GPU memory",
            f"{seen}; " + ("no engine starts there" if full else "an engine of vLLM's usual share "
            f"of {UTILISATION:.0%} does not start there"),
            "end what has it" + (" (nvidia-smi lists it)" if not held else "")
            + ", or keep engines off that GPU by CUDA_VISIBLE_DEVICES"
            + ("" if full else ", or set a smaller engine.gpu_memory_utilization"),
        )
    ]  # fmt: skip


def _held(one: HolderFacts) -> str:
    has = "some" if one.memory_bytes is None else gibibytes(one.memory_bytes)
    return f"{one.name or 'a process not visible from here'} (pid {one.pid}) has {has}"
