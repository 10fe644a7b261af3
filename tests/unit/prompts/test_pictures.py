"""Images of prompts: where rows may have them, what is refused by file and line, and what a prompt then holds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from miles_async.arguments import DataArguments
from miles_async.errors import ConfigurationError, DataError
from miles_async.prompts.image_parts import image_key
from miles_async.prompts.row import Content
from miles_async.prompts.rows import open_prompts
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.tables import spooled
from miles_async.runtime.serialization import decode, encode
from miles_async.types import JsonObject, Prompt
from tests.fakes.pictures import picture
from tests.unit.prompts.row_files import write

KEYS = '{"image": "images"}'
IMAGE = 0  # the token that the template writes for an image


RED, BLUE = picture(4, 2).content, picture(8, 8, "blue").content


def url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def tokens_of(content: Content, tools: object = ()) -> list[int]:
    """One token per character, and one per image."""
    tokens: list[int] = []
    for message in [{"content": content}] if isinstance(content, str) else content:
        parts = message["content"]
        for part in [{"text": parts}] if isinstance(parts, str) else parts:
            tokens += map(ord, part["text"]) if "text" in part else [IMAGE]
    return tokens


def one_per_column(tokens: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
    """As many tokens for an image as it is wide."""
    widths = iter(sizes)
    return [token for each in tokens for token in ([each] * next(widths)[0] if each == IMAGE else [each])]


def jsonl(folder: Path, *rows: JsonObject) -> Path:
    return write(folder / "rows.jsonl", ({"label": "1", **row} for row in rows))


def parquet(folder: Path, *rows: JsonObject) -> Path:
    path = folder / "rows.parquet"
    table = pyarrow.Table.from_pylist([{"label": "1", **row} for row in rows])
    pyarrow.parquet.write_table(table, path, row_group_size=1)
    return path


def prompts(path: Path, **flags: object) -> list[Prompt]:
    arguments = DataArguments(prompt_data=(str(path),), **flags)
    open_prompts(arguments)
    return list(FilePromptSource(arguments, tokens_of, expand=one_per_column).all_prompts())


def refusal(path: Path, **flags: object) -> str:
    with pytest.raises(DataError) as caught:
        prompts(path, **flags)
    return str(caught.value)


class TestWhereImagesAre:
    def test_a_column_of_bytes_fills_the_places_in_a_text(self, tmp_path: Path):
        row = {"prompt": "<image>a<image>b", "images": [RED, BLUE]}
        [prompt] = prompts(parquet(tmp_path, row), multimodal_keys=KEYS)
        image = {"type": "image"}
        parts = [image, {"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
        assert prompt.messages == ({"role": "user", "content": parts},)
        assert prompt.token_ids == (*[IMAGE] * 4, ord("a"), *[IMAGE] * 8, ord("b"))
        assert [picture.content for picture in prompt.pictures] == [RED, BLUE]
        assert [(picture.width, picture.height) for picture in prompt.pictures] == [(4, 2), (8, 8)]
        assert prompt.text == "<image>a<image>b"

    def test_the_images_of_the_datasets_library(self, tmp_path: Path):
        row = {"prompt": "<image>", "images": [{"bytes": RED, "path": "where/it/was.png"}]}
        [prompt] = prompts(parquet(tmp_path, row), multimodal_keys=KEYS)
        assert [picture.content for picture in prompt.pictures] == [RED]

    def test_a_column_with_one_image(self, tmp_path: Path):
        [prompt] = prompts(parquet(tmp_path, {"prompt": "<image>", "images": RED}), multimodal_keys=KEYS)
        assert [picture.content for picture in prompt.pictures] == [RED]

    def test_messages_take_images_of_the_column_in_order(self, tmp_path: Path):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a<image>"}]
        row = {"prompt": [*messages, {"role": "user", "content": "<image>"}], "images": [url(RED), url(BLUE)]}
        [prompt] = prompts(jsonl(tmp_path, row), multimodal_keys=KEYS)
        assert prompt.messages[0] == messages[0]
        assert prompt.token_ids == (ord("s"), ord("a"), *[IMAGE] * 4, *[IMAGE] * 8)
        assert [picture.content for picture in prompt.pictures] == [RED, BLUE]

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image", "image": url(RED)},
            {"type": "image_url", "image_url": {"url": url(RED)}},
            {"type": "image_url", "image_url": url(RED)},
            {"type": "image", "image": "red.png"},
        ],
    )
    def test_parts_of_messages(self, tmp_path: Path, part: JsonObject):
        (tmp_path / "red.png").write_bytes(RED)
        row = {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
        [prompt] = prompts(jsonl(tmp_path, row), image_root=tmp_path)
        assert prompt.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "?"}]
        assert [picture.content for picture in prompt.pictures] == [RED]

    def test_a_part_without_an_image_takes_one_of_the_column(self, tmp_path: Path):
        row = {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [url(RED)]}
        [prompt] = prompts(jsonl(tmp_path, row), multimodal_keys=KEYS)
        assert [picture.content for picture in prompt.pictures] == [RED]

    def test_without_a_column_the_place_is_a_text(self, tmp_path: Path):
        [prompt] = prompts(jsonl(tmp_path, {"prompt": "<image>"}))
        assert (prompt.text, prompt.pictures, len(prompt.token_ids)) == ("<image>", (), 7)

    def test_rows_without_images_stay_texts(self, tmp_path: Path):
        rows = [{"prompt": "a", "images": None}, {"prompt": "<image>", "images": [RED]}]
        first, second = prompts(parquet(tmp_path, *rows), multimodal_keys=KEYS)
        assert (first.messages, first.pictures) == (({"role": "user", "content": "a"},), ())
        assert [picture.content for picture in second.pictures] == [RED]

    def test_a_prompt_with_images_is_stored_exactly(self, tmp_path: Path):
        [prompt] = prompts(jsonl(tmp_path, {"prompt": "<image>", "images": [url(RED)]}), multimodal_keys=KEYS)
        assert decode(encode(prompt), Prompt) == prompt

    def test_equal_files_are_equal_pictures(self, tmp_path: Path):
        row = {"prompt": "<image><image><image>", "images": [url(RED), url(RED), url(BLUE)]}
        [prompt] = prompts(jsonl(tmp_path, row), multimodal_keys=KEYS)
        first, second, third = (picture.digest for picture in prompt.pictures)
        assert first == second != third


class TestRefused:
    """Each message begins with the file and the line."""

    @pytest.mark.parametrize(
        ("image", "reason"),
        [
            ("https://example.org/red.png", "download images first"),
            ("red.png", "needs --image-root"),
            (url(b"no image"), "expected an image that Pillow reads"),
            ("data:image/png;base64,???", "in base64"),
            ("data:text/plain;base64,YQ==", "expected data:image/"),
            (7, "expected bytes, a data: URL or a path, found int"),
            ({"width": 4}, "expected an object with bytes or path, found the keys width"),
        ],
    )
    def test_what_is_no_image(self, tmp_path: Path, image: object, reason: str):
        fine = {"prompt": "<image>", "images": [url(RED)]}
        path = jsonl(tmp_path, fine, {"prompt": "<image>", "images": [image]})
        message = refusal(path, multimodal_keys=KEYS)
        assert message.startswith(f"{path}:2: image 1: ")
        assert reason in message

    def test_files_outside_of_the_root(self, tmp_path: Path):
        root = tmp_path / "root"
        root.mkdir()
        (tmp_path / "red.png").write_bytes(RED)
        (root / "link.png").symlink_to(tmp_path / "red.png")
        for name in ("../red.png", "link.png", str(tmp_path / "red.png")):
            path = jsonl(tmp_path, {"prompt": "<image>", "images": [name]})
            message = refusal(path, multimodal_keys=KEYS, image_root=root)
            assert message.startswith(f"{path}:1: image 1: the path {name!r} is outside of --image-root")

    def test_a_file_that_is_missing(self, tmp_path: Path):
        path = jsonl(tmp_path, {"prompt": "<image>", "images": ["no.png"]})
        message = refusal(path, multimodal_keys=KEYS, image_root=tmp_path)
        assert message == f"{path}:1: image 1: cannot read {tmp_path / 'no.png'}: No such file or directory"

    @pytest.mark.parametrize(("prompt", "places"), [("a", 0), ("<image>", 1)])
    def test_images_without_a_place(self, tmp_path: Path, prompt: str, places: int):
        path = jsonl(tmp_path, {"prompt": prompt, "images": [url(RED)] * 2})
        message = refusal(path, multimodal_keys=KEYS)
        assert message.startswith(f"{path}:1: ")
        assert f"2 images in the column (--multimodal-keys), and the prompt has places for {places}" in message

    def test_a_place_without_an_image(self, tmp_path: Path):
        path = jsonl(tmp_path, {"prompt": "<image><image>", "images": [url(RED)]})
        assert "no image is left for it" in refusal(path, multimodal_keys=KEYS)
        path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": [{"type": "image"}]}]})
        assert "no image is left for it" in refusal(path)

    def test_a_part_that_is_neither_text_nor_image(self, tmp_path: Path):
        parts = [{"type": "image", "image": url(RED)}, {"type": "video", "video": "v.mp4"}]
        path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": parts}]})
        assert "expected parts of type text or image" in refusal(path)

    def test_a_column_that_is_missing(self, tmp_path: Path):
        assert "no key 'images' (--multimodal-keys)" in refusal(jsonl(tmp_path, {"prompt": "a"}), multimodal_keys=KEYS)
        message = refusal(parquet(tmp_path, {"prompt": "a"}), multimodal_keys=KEYS)
        assert "no column 'images' (--multimodal-keys)" in message

    def test_a_model_that_reads_no_images(self, tmp_path: Path):
        path = jsonl(tmp_path, {"prompt": "<image>", "images": [url(RED)]})
        source = FilePromptSource(DataArguments(prompt_data=(str(path),), multimodal_keys=KEYS), tokens_of)
        with pytest.raises(DataError, match=r"rows.jsonl:1: the prompt has images, and the model .* reads none"):
            source.require_usable()

    @pytest.mark.parametrize("keys", ["images", "[]", '{"image": 1}', '{"video": "videos"}'])
    def test_other_keys(self, keys: str):
        with pytest.raises(ConfigurationError, match=r"^--multimodal-keys: "):
            image_key(keys)


class TestMemory:
    def test_a_spooled_table_is_the_same_and_leaves_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        size = 2**20
        before = pyarrow.total_allocated_bytes()
        table = spooled(pyarrow.table({"images": [bytes([number]) * size]}) for number in range(3))
        assert pyarrow.total_allocated_bytes() - before < size  # the images are in the mapped file
        assert table.to_pylist() == [{"images": bytes([number]) * size} for number in range(3)]
        assert not list(tmp_path.iterdir())

    def test_prompts_with_images_count_as_long_by_their_tokens(self, tmp_path: Path):
        row = {"prompt": "<image>", "images": [url(picture(400).content)]}
        arguments = DataArguments(
            prompt_data=(str(jsonl(tmp_path, {"prompt": "a", "images": []}, row)),), multimodal_keys=KEYS
        )
        assert FilePromptSource(arguments, tokens_of, expand=one_per_column).lengths_above(200) == [400]
