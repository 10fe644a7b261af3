"""Samples that are sent or saved contain each image once, however often they refer to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from miles_async.types.pictures import Picture
from miles_async.types.samples import Branch, Sample


def slim(samples: Sequence[Sample], known: Sequence[Picture] = ()) -> tuple[Sample, ...]:
    """Leave out the content of images that are ``known``, or come again."""
    seen = {picture.digest for picture in known}

    def once(picture: Picture) -> Picture:
        if picture.digest in seen:
            return replace(picture, content=b"")
        seen.add(picture.digest)
        return picture

    return _changed(samples, once)


def restored(samples: Sequence[Sample], known: Sequence[Picture] = ()) -> tuple[Sample, ...]:
    """Undo :func:`slim`: equal images become one object, from ``known`` where it has them."""
    pictures = {p.digest: p for sample in samples for branch in sample.branches for p in branch.pictures if p.content}
    pictures |= {picture.digest: picture for picture in known}
    return _changed(samples, lambda picture: pictures[picture.digest])


def _changed(samples: Sequence[Sample], change: Callable[[Picture], Picture]) -> tuple[Sample, ...]:
    def of_branch(branch: Branch) -> Branch:
        return replace(branch, pictures=tuple(map(change, branch.pictures)))

    def of_sample(sample: Sample) -> Sample:
        if not any(branch.pictures for branch in sample.branches):
            return sample
        pictures = tuple(map(change, sample.pictures))
        return replace(sample, pictures=pictures, more_branches=tuple(map(of_branch, sample.more_branches)))

    return tuple(map(of_sample, samples))
