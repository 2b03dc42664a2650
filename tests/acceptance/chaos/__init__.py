"""Chaos: many conversations, clients that misbehave, and processes that are killed, at random.

`plan` draws what happens from a seed. It is played on real engines by
``python -m tests.acceptance.chaos``, and in virtual time, against what decides and what observes,
by ``tests/unit/deployments/test_chaos.py``.
"""
