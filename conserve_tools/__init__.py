"""Tool environments, an add-on: agents' tools run beside the engines, and agents have a client."""
