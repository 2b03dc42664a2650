"""Fixtures of tests of tool environments."""

from tests.unit.conserve_tools.world import root, world

__all__ = ["root", "world"]
