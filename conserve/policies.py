"""Chooses the policies by which histories share engines' room, live and simulated."""

from dataclasses import replace
from typing import NamedTuple

from conserve.admission import FirstCome, Levels, QueueOrder, Window
from conserve.pausing import Pausing, patience_s


class RoomPolicies(NamedTuple):
    """Policies by which histories share engines' room.

    Attributes:
        pausing: which idle histories give up their room; None: none do.
        order: in which order turns that wait for room go.
        window: how many histories may be active at a time; None: as many as there is room for.
    """

    pausing: Pausing | None
    order: QueueOrder
    window: Window | None


def room_policies(queue_timeout_s: float, *, pauses: bool, disk: bool = False) -> RoomPolicies:
    """Return the policies for turns that may wait for ``queue_timeout_s``; a disk gets them all."""
    if not pauses:
        return RoomPolicies(None, FirstCome(), None)
    # Pausing waits for most of it: simulated, what takes room from active histories soon loses it.
    patient_s = patience_s(queue_timeout_s)
    pausing = Pausing(patience_s=patient_s)
    pausing = replace(pausing, park_mark=0.0) if disk else pausing
    return RoomPolicies(pausing, Levels(rise_s=patient_s / 5), Window())
