"""The commands that this add-on gives to ``conserve``; loading it loads none of them."""

# As in `conserve_cli.main`.
COMMANDS = {
    "demo": (
        "conserve_lab.cli.demo.command",
        "Have a few agents work, and show where every prompt's KV came from.",
    ),
    "bench": (
        "conserve_lab.cli.bench",
        "Measure endpoints, and compare reports; see its own --help.",
    ),
    "profile": (
        "conserve_lab.cli.profile.command",
        "Measure a running application's engines, and write their profile; see its own --help.",
    ),
    "plan": (
        "conserve_lab.cli.plan",
        "Plan prefillers and decoders from a profile and a workload; see its own --help.",
    ),
    "record": (
        "conserve_lab.cli.record",
        "Write what goes through a running application as sessions without text.",
    ),
    "simulate": (
        "conserve_lab.cli.simulate",
        "Simulate a cluster on engines that a profile describes; see its own --help.",
    ),
}
