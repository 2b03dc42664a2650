"""Decides which idle histories give up their room, and knows where those may still be found."""

from conserve.pausing.memory import Forgotten, Memory
from conserve.pausing.policy import LEVEL_TOKENS, Idle, Leads, Pausing, patience_s
from conserve.pausing.times import Gaps, ToolTimes
from conserve.pausing.tools import RunningTools, ToolReport, TooManyTools, tool_called
