"""What the hardware is: NVML, power caps, energy, SM slots, tiers. See hetero/README.md."""
