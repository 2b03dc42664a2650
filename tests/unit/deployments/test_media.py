"""Engines fetch no media."""

import base64
import io
from typing import Any

import pytest
from PIL import Image
from vllm.multimodal.media.connector import MediaConnector

from conserve.settings import Settings
from deployments.app import llm_arguments


def connector(**settings: Any) -> tuple[Any, list[str]]:
    """vLLM's own, made as an engine makes it of its arguments; and what it would have fetched."""
    # Here, since it takes ten seconds, and files are read for every test.
    made = Settings(**settings)
    arguments = llm_arguments("decoder", made, made.decoders, gpu=False)["engine_kwargs"]
    fetched: list[str] = []

    class Connection:
        def get_bytes(self, url: str, **options: Any) -> bytes:
            fetched.append(url)
            return base64.b64decode(PIXEL)

    made_of = {
        name: arguments[name]
        for name in ("allowed_media_domains", "allowed_local_media_path")
        if name in arguments
    }
    return MediaConnector(connection=Connection(), **made_of), fetched  # type: ignore[arg-type]


def _pixel() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


PIXEL = _pixel()
DATA = "data:image/png;base64," + PIXEL


def test_an_engine_fetches_nothing_whatever_routers_may() -> None:
    media, fetched = connector(allowed_media_domains=["images.example"])
    assert media.fetch_image(DATA).size == (1, 1)
    for url in (
        "http://169.254.169.254/latest",
        "https://images.example/x.png",
        "http:///x.png",
        "HTTP://x",
    ):
        with pytest.raises(ValueError, match=r"data: URLs only"):
            media.fetch_image(url)
    with pytest.raises(RuntimeError, match="allowed-local-media-path"):
        media.fetch_image("file:///etc/passwd")
    assert fetched == []


def test_where_one_redirects_to_is_not_asked() -> None:
    made = Settings()
    config = llm_arguments("decoder", made, made.decoders, gpu=False)
    assert config["runtime_env"]["env_vars"]["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
