"""One simulated engine from the inside: which calls a step runs, and what is kept between turns.

It compares schedulers, so it is played step by step: vLLM's own (`scheduler.py`), and one that runs
the classes of `conserve.engine_scheduling` as `deployments.engine.scheduler` has vLLM obey them
(`conversations.py`), with a lane beside it where long prefills have SMs of their own (`lane.py`).
`stages.py` has a GPU that serves images in three stages, with `conserve.engine_scheduling.Stages`.
Conversations share nothing but their engine. `benchmarks.simulate.engine` has clusters of engines
that go first come, first served, in few events a turn.
"""
