"""Decides where a conversation goes, and where its turns are prefilled: see README.md."""

from typing import Literal

from conserve.placement.elastic import ElasticPlacement
from conserve.placement.engine_costs import EngineCosts, EngineStepCosts, Step, StepCosts
from conserve.placement.load import EngineLoad, Loads
from conserve.placement.policy import (
    CollocatedPlacement,
    ConversationPlacement,
    FullDisaggregationPlacement,
    PerTurnPlacement,
    PlacementPolicy,
)
from conserve.placement.state import NOTHING_SHARED, Coming, Decoder, Placement, Prefiller, Shared

PolicyName = Literal["conversation", "elastic", "collocated", "full_disaggregation", "per_turn"]

POLICIES: dict[PolicyName, type[PlacementPolicy]] = {
    "conversation": ConversationPlacement,
    "elastic": ElasticPlacement,
    "collocated": CollocatedPlacement,
    "full_disaggregation": FullDisaggregationPlacement,
    "per_turn": PerTurnPlacement,
}


def make_policy(
    name: PolicyName, number: float = 0.0, costs: EngineCosts | None = None
) -> PlacementPolicy:
    """Return the policy of this name.

    Args:
        number: ``conversation``'s least tokens of a remote prefill, or ``per_turn``'s share of
            wrong decisions; others take none.
        costs: measured costs of engines, from which ``elastic`` begins to learn; None if unknown.
    """
    match name:
        case "conversation":
            return ConversationPlacement(int(number))
        case "elastic":
            return ElasticPlacement(Loads(costs))
        case "collocated":
            return CollocatedPlacement()
        case "full_disaggregation":
            return FullDisaggregationPlacement()
        case "per_turn":
            return PerTurnPlacement(number)
