"""vLLM's scheduler, made to know conversations (``engine_scheduler: conversation``).

`scheduling.py` has the classes that vLLM makes; the others are their parts. `doors.py` lists what
is used of vLLM 0.29 that is not public. The policies are `conserve.engine_scheduling`'s.
"""
