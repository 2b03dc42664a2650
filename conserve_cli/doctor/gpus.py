"""GPUs: driver, NVML, and what may be done with them."""

from conserve.settings import Settings
from conserve_cli.doctor.facts import GpuFacts
from conserve_cli.doctor.findings import Finding


def check_gpus(
    facts: GpuFacts, settings: Settings, caps_power: bool, has_engines: bool = True
) -> list[Finding]:
    """What NVML says of this node's GPUs.

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
    named = ", ".join(f"{facts.names.count(name)} x {name}" for name in dict.fromkeys(facts.names))
    runs = f"driver {facts.driver}, CUDA up to {facts.cuda[0]}.{facts.cuda[1]}"
    findings = [Finding("ok", "GPU", f"{named or 'none answers'}; {runs}")]
    findings += [
        Finding(
            "wrong", "GPU", f"GPU {index} does not answer: it fell off the bus",
            "see dmesg for its Xid; reset it or restart the machine",
        )
        for index in facts.lost
    ]  # fmt: skip
    if caps_power and not facts.may_cap_power:
        findings.append(
            Finding(
                "warning", "power", "this user may not change power limits: GPUs run uncapped",
                "run the node's Ray as root or with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN)",
            )
        )  # fmt: skip
    return findings
