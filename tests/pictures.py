"""Images of many kinds, those that are served and those that are refused."""

import io
import struct
import zlib
from typing import Any

from PIL import Image


def written(image: Image.Image, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


PICTURE = Image.linear_gradient("L").convert("RGB")
PNG = written(PICTURE, "PNG")
_ANIMATED: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", (256, 256))] * 3}
SVG = b"""<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY file SYSTEM "file:///etc/passwd">]>
<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text>&file;</text></svg>"""


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def _png_header(width: int, height: int) -> bytes:
    """A PNG that says it is this large, and has nothing in it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", b"") + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _with_text(png: bytes, count: int) -> bytes:
    """The same with texts of a megabyte each, compressed."""
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * 1_000_000))
    first = 8 + 25
    return png[:first] + text * count + png[first:]


# What each is served as.
SERVED = {
    "png": (PNG, "image/png"),
    "jpeg": (written(PICTURE, "JPEG"), "image/jpeg"),
    "webp": (written(PICTURE, "WEBP"), "image/webp"),
    "cmyk": (written(PICTURE.convert("CMYK"), "JPEG"), "image/jpeg"),
    "16 bit": (written(Image.new("I;16", (8, 8)), "PNG"), "image/png"),
    "one bit": (written(Image.new("1", (8, 8)), "BMP"), "image/bmp"),
    "transparent": (written(PICTURE.convert("RGBA"), "PNG"), "image/png"),
    "animated gif": (written(PICTURE, "GIF", **_ANIMATED), "image/gif"),
    "animated png": (written(PICTURE, "PNG", **_ANIMATED), "image/png"),
    "animated webp": (written(PICTURE, "WEBP", **_ANIMATED), "image/webp"),
    "1 x 100,000": (written(Image.new("L", (1, 100_000)), "PNG"), "image/png"),
    "palette": (written(PICTURE.convert("P"), "PNG"), "image/png"),
}

# What each refusal says.
REFUSED = {
    "nothing": (b"", "no image that can be read"),
    "text": (b"hello", "no image that can be read"),
    "svg": (SVG, "no image that can be read"),
    "icon": (written(PICTURE, "ICO"), "no image that can be read"),
    "pdf": (written(PICTURE, "PDF"), "no image that can be read"),
    "tiff": (written(PICTURE, "TIFF"), "no image that can be read"),
    "cut png": (PNG[: len(PNG) // 2], "damaged"),
    "cut jpeg": (written(PICTURE, "JPEG")[:300], ""),
    "broken png": (PNG[:60] + b"\0" * 40 + PNG[100:], "damaged"),
    # A megabyte of text in a kilobyte of file, many times.
    "text bomb": (_with_text(PNG, 200), ""),
    "bomb": (_png_header(100_000, 100_000), "more than 16,000,000 pixels"),
    "large": (_png_header(5_000, 5_000), "more than 16,000,000 pixels (5000 x 5000)"),
    "header alone": (_png_header(100, 100), "damaged"),
}
