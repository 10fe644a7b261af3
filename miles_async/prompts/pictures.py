"""Images of rows: where they are, how they are written, and their checks.

An image is bytes, an object with the field bytes or path (as the Hugging Face datasets library writes images to
Parquet), a ``data:`` URL, or the path of a file under ``--image-root``. Nothing is downloaded.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_async.errors import DataError
from miles_async.types import Picture
from miles_async.types.pictures import content_of_url, digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSource:
    """An image that a row names, not read yet."""

    source: bytes | Path  # its content, or its file
    where: str  # beginning of messages: location of the row, and which image of it

    def read(self) -> Picture:
        """Read the image; its pixels are not decoded. Raises DataError beginning with the row's location."""
        try:
            content = self.source if isinstance(self.source, bytes) else self.source.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from None
        width, height = self._size(content)
        return Picture(content=content, digest=digest_of(content), width=width, height=height)

    def size(self) -> tuple[int, int]:
        """Width and height, from the image's header. Raises DataError beginning with the row's location."""
        return self._size(self.source)

    def _size(self, content: bytes | Path) -> tuple[int, int]:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
                return image.width, image.height
        except (Image.UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
            file = "" if isinstance(self.source, bytes) else f" in {self.source}"
            raise DataError(f"{self.where}: expected an image that Pillow reads{file}: {error}") from None
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> DataError:
        named = "it" if isinstance(self.source, bytes) else self.source
        return DataError(f"{self.where}: cannot read {named}: {error.strerror or error}")


def picture_source(value: object, root: Path | None, where: str) -> PictureSource:
    """Check how an image is written, without reading a file. ``root``: ``--image-root``.

    Raises DataError beginning with ``where``.
    """
    if isinstance(value, Mapping):
        named = [value[key] for key in ("bytes", "path") if value.get(key) is not None]
        if not named:
            raise DataError(f"{where}: expected an object with bytes or path, found the keys {', '.join(value)}")
        value = named[0]  # next to bytes, path is where they once were
    if isinstance(value, bytes):
        return PictureSource(source=value, where=where)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: expected bytes, a data: URL or a path, found {type(value).__name__}")
    if value.startswith("data:"):
        return PictureSource(source=_from_url(value, where), where=where)
    if "://" in value:
        raise DataError(f"{where}: expected a data: URL or a path, found {value[:80]}: download images first")
    return PictureSource(source=_under(root, value, where), where=where)


def _from_url(url: str, where: str) -> bytes:
    try:
        return content_of_url(url)
    except ValueError as error:
        raise DataError(f"{where}: expected data:image/...;base64, and the image in base64: {error}") from None


def _under(root: Path | None, name: str, where: str) -> Path:
    """The file ``name`` in ``root``, out of which no path and no link leads."""
    if root is None:
        raise DataError(f"{where}: the path {name!r} needs --image-root, the folder with the images")
    folder = root.resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise DataError(f"{where}: the path {name!r} is outside of --image-root {root}")
    return path
