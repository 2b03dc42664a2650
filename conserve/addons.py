"""Finds add-ons: packages beside the core that attach by entry points; the core imports none.

The group `conserve.addons` has an object for each add-on that the core asks, under the name of its
package; `conserve.commands` has add-ons' commands.
"""

from importlib.metadata import entry_points
from typing import Any

INSIDE, LAB, TOOLS = "conserve_inside", "conserve_lab", "conserve_tools"
ADDONS = (INSIDE, LAB, TOOLS)


def offered(group: str, only: str | None = None) -> dict[str, Any]:
    """Return what the add-ons that are installed here offer in an entry-point group, by name.

    ``only`` is the one that is wanted; others are not loaded.
    """
    found = {}
    for entry in entry_points(group=group):
        if only not in (None, entry.name):
            continue
        try:
            found[entry.name] = entry.load()
        except ModuleNotFoundError as error:
            # The add-on was left out of an image. An error within one is not hidden.
            if error.name not in (entry.module, entry.module.partition(".")[0]):
                raise
    return found


def addon(name: str) -> Any:
    """Return an add-on's object, by its package's name; None: it is not installed here."""
    return offered("conserve.addons", only=name).get(name)


def missing(what: str, name: str) -> str:
    """Return the sentence that refuses a part of an add-on that is not installed."""
    return (
        f"{what} needs the add-on {name}, which is not installed here; install ConServe with it "
        "(make install, or pip install in its repository)"
    )
