"""An engine on leased SMs (``tiers.NAME.sm_slots``)."""
