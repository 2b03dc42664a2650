"""Decides how many replicas there are, from observations alone (ConServe, section 4.2). Pure."""
