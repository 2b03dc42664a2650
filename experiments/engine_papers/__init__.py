"""MARS's and AgentServe's evaluations, simulated inside one engine, beside what they publish."""
