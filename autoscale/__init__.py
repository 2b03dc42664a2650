"""How many replicas: from what is observed alone (ConServe, section 4.2), as pure functions."""
