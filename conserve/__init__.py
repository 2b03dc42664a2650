"""ConServe: serve multi-turn agents on your own GPUs, scheduled by the conversation.

``serve run conserve.app`` starts it. Only the attribute ``app`` loads Ray and vLLM.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "app":
        from deployments.app import app

        return app
    raise AttributeError(f"module 'conserve' has no attribute {name!r}")
