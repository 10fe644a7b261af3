"""Kinds of file systems: which ones are across a network."""

from __future__ import annotations

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_ACROSS_A_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs\w*|ceph|glusterfs|afs|wekafs|panfs|pvfs2|orangefs|ocfs2"
    r"|fuse\.(sshfs|juicefs|s3fs|gcsfuse|glusterfs|ceph\S*|rclone|mount-s3|goofys|geesefs|blobfuse2?|cvmfs\w*)"
)


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the kind of the file system that ``path`` is on, as "nfs4", if it is across a network; else None."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:  # no Linux, or nothing to be seen: nobody is held up for that
        return None
    place = path.resolve()
    longest, kind = -1, ""
    for line in lines:  # man 5 proc: id, parent, device, root, mount point, options, ... - kind, source, options
        before, dash, after = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), before.split(" ")[4]))
        if dash and place.is_relative_to(point) and len(point.parts) >= longest:  # a later mount hides an earlier one
            longest, kind = len(point.parts), after.split(" ")[0]
    return kind if _ACROSS_A_NETWORK.fullmatch(kind) else None
