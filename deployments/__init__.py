"""Ray Serve deployments and actors of ConServe: thin parts that observe, ask a policy and act."""
