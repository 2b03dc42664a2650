"""ConServe: serve multi-turn agents on your own GPUs, scheduled by the conversation.

``serve run conserve.app`` starts it. Importing this package is quick and needs neither Ray nor
vLLM nor a GPU; only the attribute ``app`` loads them.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "app":
        from deployments.app import app

        return app
    raise AttributeError(f"module 'conserve' has no attribute {name!r}")
