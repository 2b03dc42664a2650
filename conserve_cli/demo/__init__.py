"""``conserve demo``: agents at work, served while you watch.

Each agent gets a task that takes several tool calls, and does it with the embedded model, the
official client and real Python tools. Turn by turn it shows what the agent did, and where the
prompt's KV came from, by the engines' own account: the first turn's from LMCache (the one
handoff), later ones' from the decoder's own cache.
"""
