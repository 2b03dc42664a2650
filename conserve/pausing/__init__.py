"""Decides whose KV stays: which idle histories give up their room, and where those may be found.

Plain Python with the time as an argument: the conversation table and the simulator run the same
same classes.
"""

from conserve.pausing.cache import EngineCache
from conserve.pausing.gaps import Gaps
from conserve.pausing.memory import Forgotten, Memory
from conserve.pausing.policy import Idle, Pausing
from conserve.pausing.tools import RunningTools, ToolReport, TooManyTools, tool_called

__all__ = [
    "EngineCache",
    "Forgotten",
    "Gaps",
    "Idle",
    "Memory",
    "Pausing",
    "RunningTools",
    "TooManyTools",
    "ToolReport",
    "tool_called",
]
