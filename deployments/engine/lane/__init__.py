"""Long prefills beside an engine's steps (AgentServe, algorithm 1).

To vLLM the lane is a KV connector that loads a prompt's KV asynchronously; the KV comes from a
thread of the engine's own worker, which computes it in chunks. `scheduler_lane` and `connector`
are the scheduler's part of it, `thread`, `forward`, `turns` and `working` the worker's, `notes`
what both tell each other, `stream` what its kernels run on, `fits` for which engines it is.
"""
