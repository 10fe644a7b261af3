"""File systems across a network are told from local ones by the kernel's table of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.runtime.files.scratch import network_file_system

MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
23 22 0:21 / /scratch rw,relatime shared:1 - lustre mgs@tcp:/fs rw
24 23 0:22 / /scratch/local\040disk rw - xfs /dev/nvme0n1 rw
25 22 0:23 / /home rw,noatime master:1 - nfs4 server:/home rw,vers=4.2
26 22 0:24 / /home rw - tmpfs tmpfs rw
27 22 0:25 / /data rw - fuse.juicefs JuiceFS:data rw
28 22 0:26 / /box rw - fuse.fuse-overlayfs overlay rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/tmp/x", None),
        ("/scratch/me/tmp", "lustre"),
        ("/scratch/local disk/tmp", None),
        ("/scratcher", None),  # no part of /scratch
        ("/home/me", None),  # the later mount hides the earlier one
        ("/data/tmp", "fuse.juicefs"),
        ("/box", None),  # a container's own layers
    ],
)
def test_the_mount_that_a_place_is_on_says_its_kind(place: str, kind: str | None, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_file_system(Path(place), mounts) == kind


def test_without_a_table_nothing_is_said(tmp_path: Path) -> None:
    assert network_file_system(tmp_path, tmp_path / "absent") is None
