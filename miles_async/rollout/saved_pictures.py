"""Groups in a checkpoint hold each image of their prompt once, though every sample refers to it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from miles_async.types import Branch, Group, Picture, Sample


def slim(group: Group) -> Group:
    """Leave the content out of the samples' images that the prompt has, too."""
    own = {picture.digest for picture in group.attempt.prompt.pictures}
    return _changed(group, lambda picture: replace(picture, content=b"") if picture.digest in own else picture)


def restored(group: Group) -> Group:
    """Undo :func:`slim`: the samples refer to the prompt's images again."""
    own = {picture.digest: picture for picture in group.attempt.prompt.pictures}
    return _changed(group, lambda picture: own.get(picture.digest, picture))


def _changed(group: Group, change: Callable[[Picture], Picture]) -> Group:
    if not group.attempt.prompt.pictures:
        return group

    def of_branch(branch: Branch) -> Branch:
        return replace(branch, pictures=tuple(map(change, branch.pictures)))

    def of_sample(sample: Sample) -> Sample:
        pictures = tuple(map(change, sample.pictures))
        return replace(sample, pictures=pictures, more_branches=tuple(map(of_branch, sample.more_branches)))

    return replace(group, samples=tuple(map(of_sample, group.samples)))
