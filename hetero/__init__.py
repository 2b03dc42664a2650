"""Knows the hardware: NVML, power caps, energy, SM slots, tiers. See hetero/README.md."""
