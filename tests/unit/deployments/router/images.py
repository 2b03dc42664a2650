"""Images as clients send them."""

import base64
import io

from PIL import Image


def png(colour: int = 0, size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
