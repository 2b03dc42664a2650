"""``conserve demo``: runs a few agents while you watch.

Each agent does a task of several tool calls with an embedded model and the official client: with
real Python tools, or, with ``conserve demo vision``, by clicking through screens that it is shown.
For each turn a table shows what the agent did, and where the engines found the prompt's KV: the
first turn's in LMCache (the one handoff), later ones' in the decoder's own cache. Of images it
shows how many were encoded, and how many came from the node's memory.

Agents that name their conversation are `conserve_tools.client.Agent`s, which tell the server when a
tool starts and ends. The others are any client of OpenAI's API.
"""
