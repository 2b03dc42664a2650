"""Who goes to a decoder now, who waits for room in which order, and who is turned away.

Plain Python with the time as an argument: the conversation table's actor and the simulator run the
same `Admission`.
"""

from conserve.admission.admission import Admission, Admitted
from conserve.admission.waiting import QueueFull, Ticket, WaitingLine

__all__ = ["Admission", "Admitted", "QueueFull", "Ticket", "WaitingLine"]
