"""What a node of a cluster lacks is said with the flag to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError
from miles_async.runtime.node_files import NodeFiles, marked


def test_a_node_that_shares_a_directory_sees_its_mark(tmp_path: Path) -> None:
    """Another node is one that has no such file: here, after the mark is gone."""
    with marked({"--save": tmp_path / "not" / "there" / "yet"}) as marks:
        files = NodeFiles(shared=marks)
        files.check()
        assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ConfigurationError, match=r"--save: expected a directory that all nodes share, .* does not see"):
        files.check()
    assert not list(tmp_path.iterdir())


def test_directories_that_a_copy_will_do_for_have_to_be_there(tmp_path: Path) -> None:
    NodeFiles(present={"--hf-checkpoint": tmp_path}).check()
    with pytest.raises(ConfigurationError, match=r"--hf-checkpoint .*/absent: expected this directory on every node"):
        NodeFiles(present={"--hf-checkpoint": tmp_path / "absent"}).check()


def test_a_directory_that_cannot_be_marked_is_named() -> None:
    with pytest.raises(ConfigurationError, match="--save /proc"), marked({"--save": Path("/proc")}):
        pass
