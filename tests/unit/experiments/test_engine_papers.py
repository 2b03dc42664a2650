"""The papers' workloads, and what stands around the engine."""

from statistics import fmean

import pytest

from benchmarks.simulate.inside.loop import Loop
from benchmarks.workloads import Arrivals
from conserve.admission import Ticket
from experiments.claims import Claim
from experiments.engine_papers import agentserve, mars
from experiments.engine_papers.__main__ import ratios
from experiments.engine_papers.mars import SmallestFirst
from experiments.engine_papers.programs import Program, Tools, Turn, draw
from experiments.scale import regime


@pytest.mark.parametrize("name", mars.VOLUMES_TOKENS)
def test_programs_are_as_long_as_the_paper_says(name: str) -> None:
    volume_tokens = mars.VOLUMES_TOKENS[name]
    programs = draw(regime(volume_tokens), 1_000, Arrivals("poisson", 1.0), seed=0)
    mean_tokens = fmean(one.prompts_tokens for one in programs)
    # Outputs come on top of what the regime's arithmetic counts.
    assert 0.9 * volume_tokens < mean_tokens < 1.2 * volume_tokens


def test_tools_wait_for_a_core() -> None:
    loop, ended = Loop(), []
    tools = Tools(loop, cores=2)
    for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 1.0), ("d", 1.0)):
        tools.run(seconds, lambda name=name: ended.append((name, loop.now_s)))
    assert tools.pressure == 1.0
    loop.run()
    assert ended == [("a", 1.0), ("c", 2.0), ("b", 3.0), ("d", 3.0)]
    assert tools.pressure == 0.0


@pytest.mark.parametrize(
    "system", [*mars.SYSTEMS, *mars.WITHOUT, mars.TIMED], ids=lambda one: one.name
)
def test_every_system_does_all_of_the_work(system: mars.System) -> None:
    arrivals = Arrivals("poisson", 1.0, 0)
    programs = draw(regime(mars.VOLUMES_TOKENS["ILR-2"]), 12, arrivals, seed=0)
    node = mars.Node(system, mars.GPUS["H100"], cores=4)
    took_s = node.serve(programs)
    alone_s = [sum(turn.tool_s for turn in one.turns) for one in programs]
    assert all(took > alone for took, alone in zip(took_s, alone_s, strict=True))
    outputs = sum(turn.output_tokens for one in programs for turn in one.turns)
    turns = sum(len(one.turns) for one in programs)
    # Each turn's first token comes of its prefill, also of one that was preempted.
    assert node.engine.decoded_tokens == outputs - turns - node.scheduler.preemptions


def test_the_window_follows_tools_that_wait_for_cores() -> None:
    """Programs come slowly, and then in a burst; tools have two cores, or enough."""

    def least(cores: int) -> float:
        calm_s = [30.0 * number for number in range(20)]
        arrivals_s = [*calm_s, *(700.0 + number for number in range(40))]
        turns = (Turn(500, 20, 5.0),) * 12 + (Turn(500, 20, 0.0),)
        node = mars.Node(mars.TIMED, mars.GPUS["H200"], cores)
        limits: list[float] = []
        control = node.control
        assert control is not None
        look = control._look

        def looks() -> None:
            look()
            limits.append(control.window.limit)

        control._look = looks  # type: ignore[method-assign]
        node.serve([Program(f"p{at:g}", at, turns) for at in arrivals_s])
        return min(limits)

    assert least(cores=2) < 10
    assert least(cores=64) == float("inf")


def test_a_lone_program_takes_as_long_under_each_system() -> None:
    turns = (Turn(5_000, 100, 2.0), Turn(300, 50, 1.0), Turn(200, 20, 0.0))
    took_s = {
        system.name: mars.Node(system, mars.GPUS["H200"], 1).serve([Program("p", 0.0, turns)])[0]
        for system in (*mars.SYSTEMS, *mars.WITHOUT)
    }
    assert max(took_s.values()) == pytest.approx(min(took_s.values()), rel=0.001)


def test_admission_lets_in_what_fits() -> None:
    capacity = mars.Node(mars.OURS, mars.GPUS["H100"], 1).scheduler.blocks.total * 16
    turns = (Turn(capacity * 2 // 5, 400, 0.0),)
    programs = [Program(f"p{number}", 0.0, turns) for number in range(4)]
    node = mars.Node(mars.OURS, mars.GPUS["H100"], 1)
    took_s = node.serve(programs)
    # Two at a time, the other two when these have gone.
    assert max(took_s[:2]) < min(took_s[2:])
    assert node.control is not None
    assert node.control.longest_wait_s >= min(took_s[:2])


def test_packing_goes_by_size_and_turns_round_while_cpus_are_overloaded() -> None:
    overloaded = [False]
    order = SmallestFirst(lambda: overloaded[0])
    for key, tokens in (("b", 20), ("c", 30), ("a", 10)):
        order.join(Ticket(key, tokens, 0.0, 0.0, 60.0))
    assert [one.history_id for one in order.tickets(0.0)] == ["a", "b", "c"]
    overloaded[0] = True
    assert [one.history_id for one in order.tickets(0.0)] == ["c", "b", "a"]


def test_goodput_counts_programs_that_took_no_longer_than_a_multiple_of_their_time_alone() -> None:
    def goodput(rate_per_s: float) -> tuple[float, ...]:
        point = mars.Point("H100", "ILR-1", rate_per_s, programs=24)
        return mars.run(mars.BASELINES[0], point, seed=0).goodput_per_s

    # Alone nearly all the time, every program meets both targets.
    two, three = goodput(0.001)
    assert two == three > 0
    # All at a time, they share the engine, and some are late.
    two, three = goodput(1000.0)
    assert two < three


def test_a_session_fails_its_slos_by_any_turn() -> None:
    point = agentserve.Point("5090", "Qwen2.5-3B", "react", 1)
    assert agentserve.run(agentserve.VLLM_NOW, point, seed=0).attained == 1.0
    crowd = agentserve.Point("A5000", "Llama-3-8B", "react", 24)
    few = agentserve.run(agentserve.LLAMA_CPP, crowd, seed=0)
    assert few.attained < 0.2
    assert few.ttft_p50_s < few.ttft_p95_s


def test_agents_run_one_session_after_the_other() -> None:
    point = agentserve.Point("5090", "Qwen2.5-3B", "react", 3)
    for system in agentserve.SYSTEMS:
        one = agentserve.run(system, point, seed=0)
        assert 0 < one.ttft_p50_s < one.ttft_p95_s
        assert 0 < one.tpot_p50_s <= one.tpot_p95_s
        assert one == agentserve.run(system, point, seed=0)


def test_ratios_are_of_the_best_at_each_point_and_means_over_seeds() -> None:
    def outcome(system: str, seed: int, mean_s: float) -> mars.Outcome:
        point = mars.Point("H100", "ILR-1", 0.1)
        return mars.Outcome(system, point, seed, mean_s, 0, 0, (), 0, 0, 0, 0, 0)

    found = [outcome("a", 0, 8.0), outcome("b", 0, 4.0), outcome("ours", 0, 2.0)]
    found += [outcome("a", 1, 8.0), outcome("b", 1, 16.0), outcome("ours", 1, 1.0)]
    (ratio,) = ratios(found, lambda one: one.mean_s, ["a", "b"], "ours").values()
    assert ratio == pytest.approx(4.0)
    claim = Claim("", "", "", 2.0, [1.0, 4.0])
    assert (claim.comes_out, claim.simulated) == ("1 of 2", "1.00 to 4.00")
