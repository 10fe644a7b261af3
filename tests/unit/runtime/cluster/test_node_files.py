"""What a node of a cluster lacks is said with the flag to change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_async.errors import ConfigurationError
from miles_async.runtime.cluster.node_files import NodeFiles, marked


def test_a_node_that_shares_a_directory_sees_its_mark(tmp_path: Path) -> None:
    """Another node is one that has no such file: here, after the mark is gone."""
    with marked({"--save": tmp_path / "not" / "there" / "yet"}) as marks:
        files = NodeFiles(shared=marks, otherwise="stay at home")
        files.check()
        assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ConfigurationError, match=r"--save: expected a directory that all nodes share, .* stay at home"):
        files.check()
    assert not list(tmp_path.iterdir())


def test_the_mark_of_a_run_that_was_killed_goes_with_the_next(tmp_path: Path) -> None:
    marking = "from pathlib import Path; from miles_async.runtime.cluster.node_files import marked; import os, sys\n"
    marking += "with marked({'--save': Path(sys.argv[1])}): os._exit(0)"
    subprocess.run([sys.executable, "-c", marking, str(tmp_path)], check=True)
    assert len(list(tmp_path.iterdir())) == 1
    with marked({"--save": tmp_path}) as marks:
        assert list(tmp_path.iterdir()) == list(marks.values())


def test_directories_that_a_copy_will_do_for_have_to_be_there(tmp_path: Path) -> None:
    NodeFiles(present={"--hf-checkpoint": tmp_path}).check()
    with pytest.raises(ConfigurationError, match=r"--hf-checkpoint .*/absent: expected this directory on every node"):
        NodeFiles(present={"--hf-checkpoint": tmp_path / "absent"}).check()


def test_a_directory_that_cannot_be_marked_is_named() -> None:
    with pytest.raises(ConfigurationError, match="--save /proc"), marked({"--save": Path("/proc")}):
        pass
