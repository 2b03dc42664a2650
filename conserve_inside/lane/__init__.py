"""Long prefills beside an engine's steps (AgentServe, algorithm 1).

To vLLM the lane is a KV connector that loads a prompt's KV asynchronously. The KV comes from a
thread of the engine's own worker, which computes it in chunks. `connector` and `scheduler_lane` are
the scheduler's part, `thread` and `worker` the worker's.
"""
