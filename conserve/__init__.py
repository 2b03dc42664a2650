"""ConServe: serve multi-turn agents on your own GPUs, scheduled by the conversation.

``serve run conserve.app`` starts it. Only the attribute ``app`` loads Ray and vLLM.
"""

from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "app":
        from conserve.versions import other_package

        if other := other_package():
            raise ImportError(other)
        from deployments.app import app

        return app
    raise AttributeError(f"module 'conserve' has no attribute {name!r}")
