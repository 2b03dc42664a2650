"""vLLM's scheduler, made to know conversations (``engine_scheduler: conversation``, or
``conversation_lane``).

`scheduling` has the classes that vLLM makes, and the other files their parts. `scheduler` in
`upstream/seams.toml` lists what is used of vLLM that is not public. The policies are in
`conserve_inside.policy`.
"""
