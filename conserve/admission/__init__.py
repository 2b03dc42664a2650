"""Decides which conversations go to a decoder now, and which wait, in which order."""

from conserve.admission.admission import Admission, Admitted, Pressure, Window
from conserve.admission.queue import FirstCome, Levels, Queue, QueueFull, QueueOrder, Ticket
