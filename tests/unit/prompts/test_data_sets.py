"""Data sets of a hub, here one on this machine, and folders that ``datasets`` saved.

``datasets`` reads its settings when it is imported, so a process answers questions about it. # covers: P8, R11
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from miles_async.arguments.prompt_files import HubName, hub_name
from miles_async.errors import ConfigurationError
from tests.fakes.hub import FakeHub, fake_hub

pytestmark = pytest.mark.timeout(120)

NAME = "owner/sums"
ANSWER = """
import json, sys
from miles_async.arguments import DataArguments
from miles_async.errors import MilesAsyncError
from miles_async.prompts.source import FilePromptSource
for line in sys.stdin:
    place, state, anyway = json.loads(line)
    try:
        source = FilePromptSource(DataArguments(prompt_data=(place,)), lambda content, tools: (1,), anyway=anyway)
        changes = source.restore(state) if state else []
        prompts = [(prompt.prompt_id, prompt.text, prompt.label) for prompt in source.all_prompts()]
        answer = {"prompts": prompts, "state": source.state(), "changes": list(changes)}
    except MilesAsyncError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


def parquet(*numbers: int) -> bytes:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number} + 1"}],
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
        }
        for number in numbers
    ]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


CARD = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train.parquet
  - split: test
    path: small/test.parquet
- config_name: large
  data_files: large/*.parquet
---
"""


class Asker:
    """Asks ``FilePromptSource`` in a process whose hub is ``hub``."""

    def __init__(self, home: Path, hub: FakeHub, **environment: str) -> None:
        self.hub = hub
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", ANSWER],
            env={**inherited, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __call__(self, place: str, state: object = None, anyway: tuple[str, ...] = ()) -> dict:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([place, state, anyway]) + "\n")
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf_home")


@pytest.fixture(scope="module")
def ask(home: Path) -> Iterator[Asker]:
    with fake_hub(NAME) as hub, closing(Asker(home, hub)) as asker:
        yield asker


def small(*numbers: int) -> dict[str, bytes]:
    return {"README.md": CARD, "small/train.parquet": parquet(*numbers), "small/test.parquet": parquet(9)}


def test_a_data_set_of_the_hub_is_pinned_and_a_resume_compares_it(ask: Asker) -> None:
    first = ask.hub.push(small(1, 2))
    found = ask(f"hf:{NAME}:small:train")
    assert found["prompts"] == [
        ["owner/sums:small:train:1", "1 + 1", "2"],
        ["owner/sums:small:train:2", "2 + 1", "3"],
    ]
    assert found["state"]["revision"] == first

    assert ask(f"hf:{NAME}:small:train", found["state"])["changes"] == []
    second = ask.hub.push(small(1, 2, 3))
    refused = ask(f"hf:{NAME}:small:train", found["state"])["error"]
    assert refused.startswith(f"CheckpointError: hf:{NAME}:small:train: cannot continue in the middle of other prompts")
    assert f"revision was '{first}' when the checkpoint was written and is '{second}' now" in refused
    assert f"Restore --prompt-data (hf:{NAME}@{first}:small:train), or" in refused

    assert ask(f"hf:{NAME}@{first}:small:train", found["state"])["prompts"] == found["prompts"]
    accepted = ask(f"hf:{NAME}:small:train", found["state"], ("prompt_data",))
    assert len(accepted["prompts"]) == 3
    assert accepted["state"]["epoch"] == 1


def test_without_the_hub_names_the_failure(ask: Asker, home: Path) -> None:
    with closing(Asker(home, ask.hub, HF_HUB_OFFLINE="1")) as offline:
        assert "cannot be read: OfflineModeIsEnabled: Cannot reach" in offline(f"hf:{NAME}:small:test")["error"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("hf:owner/absent", "hf:owner/absent: cannot be read: "),
        (f"hf:{NAME}", "small"),  # the configs there are
        (f"hf:{NAME}:small:dev", "dev"),
        (f"hf:{NAME}@v2:small:train", f"hf:{NAME}@v2:small:train: cannot be read: RevisionNotFoundError"),
    ],
)
def test_what_the_hub_has_not_is_named(place: str, message: str, ask: Asker) -> None:
    ask.hub.push(small(1))
    error = ask(place)["error"]
    assert error.startswith(f"DataError: {place}: cannot be read: ")
    assert message in error


def test_a_saved_folder(ask: Asker, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": f"p {row}", "label": "1", "other": row} for row in range(3)])
    rows.select([2, 0]).save_to_disk(str(tmp_path / "saved"))
    found = ask(f"{tmp_path}/saved")
    assert found["prompts"] == [["saved:1", "p 2", "1"], ["saved:2", "p 0", "1"]]
    assert ask(f"{tmp_path}/saved@[1:]")["prompts"] == found["prompts"][1:]

    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "both"))
    assert (
        f"holds several splits: give one of {tmp_path}/both/train, {tmp_path}/both/test"
        in ask(f"{tmp_path}/both")["error"]
    )
    (tmp_path / "empty").mkdir()
    assert "expected a folder that datasets saved (save_to_disk)" in ask(f"{tmp_path}/empty")["error"]


def test_without_the_package_the_extra_is_named(ask: Asker, home: Path, tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise ImportError\n")
    with closing(Asker(home, ask.hub, PYTHONPATH=str(tmp_path))) as without:
        error = without(f"hf:{NAME}")["error"]
    assert error == f"DataError: hf:{NAME}: needs the package datasets: pip install 'miles-async[datasets]'"


def test_names() -> None:
    assert hub_name("hf:gsm8k") == HubName("gsm8k")
    assert hub_name("hf:openai/gsm8k@refs/pr/1:test") == HubName("openai/gsm8k", "refs/pr/1", None, "test")
    assert hub_name("hf:openai/gsm8k@abc:main:test").at("def") == "hf:openai/gsm8k@def:main:test"
    for wrong in ("hf:", "hf:a/b/c", "hf:a:b:c:d", "hf:a/b::test", "hf:a b"):
        with pytest.raises(ConfigurationError, match="expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"):
            hub_name(wrong)
