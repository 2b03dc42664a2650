"""Decides who goes to a decoder now, who waits for room in which order, and who is turned away.

Plain Python with the time as an argument: the conversation table's actor and the simulator run the
same `Admission`.
"""

from conserve.admission.admission import Admission, Admitted
from conserve.admission.first_come import FirstCome
from conserve.admission.levels import Levels
from conserve.admission.ticket import LineOrder, Ticket
from conserve.admission.waiting import QueueFull, WaitingLine
from conserve.admission.window import Pressure, Window

__all__ = [
    "Admission",
    "Admitted",
    "FirstCome",
    "Levels",
    "LineOrder",
    "Pressure",
    "QueueFull",
    "Ticket",
    "WaitingLine",
    "Window",
]
