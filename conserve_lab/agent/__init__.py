"""A small family of agents' tasks, and an agent's loop to do them in.

The embedded model is trained on these tasks and tested with them. Nothing here needs an engine.
"""

from conserve_lab.agent.loop import (
    Complete,
    Reply,
    Score,
    Transcript,
    client_complete,
    run_agent,
    score,
)
from conserve_lab.agent.tasks import (
    Message,
    Session,
    is_right,
    make_session,
    plain_conversation,
    stated,
    transcript,
)
from conserve_lab.agent.tools import Call, Schema, ToolError
from conserve_lab.agent.words import Split
