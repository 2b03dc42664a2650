"""Decides which conversations go to a decoder now, and which wait, in which order."""

from conserve.admission.admission import Admission, Admitted
from conserve.admission.waiting import FirstCome, Levels, LineOrder, QueueFull, Ticket, WaitingLine
from conserve.admission.window import Pressure, Window
