"""Images on their way to another process: once, and the same afterwards."""

from __future__ import annotations

import msgspec

from miles_async.runtime.serialization import decode, encode
from miles_async.types import Branch, Picture, Sample
from miles_async.types.shared_pictures import restored, slim
from tests.property.builders import make_group

LARGE = Picture(content=bytes(100_000), digest="large", width=56, height=56)
ELSEWHERE = Picture(content=bytes(50_000), digest="elsewhere", width=28, height=28)


def samples_with(*pictures: Picture) -> tuple[Sample, ...]:
    samples = [
        msgspec.structs.replace(sample, pictures=pictures) for sample in make_group(1, versions=[(0,)] * 4).samples
    ]
    more = Branch(**{name: getattr(samples[0], name) for name in Branch.__struct_fields__})
    samples[0] = msgspec.structs.replace(samples[0], more_branches=(more,))
    return tuple(samples)


def test_each_image_is_there_once_and_comes_back_exactly() -> None:  # covers: C9
    samples = samples_with(LARGE, ELSEWHERE)
    for known in ((), (LARGE,)):
        saved = encode(slim(samples, known))
        contents = sum(len(each.content) for each in (LARGE, ELSEWHERE) if each not in known)
        assert contents <= len(saved) < contents + len(ELSEWHERE.content)
        loaded = restored(decode(saved, tuple[Sample, ...]), known)
        assert encode(loaded) == encode(samples)
        branches = [branch for sample in loaded for branch in sample.branches]
        assert len({id(picture) for branch in branches for picture in branch.pictures}) == 2
        assert all(branch.pictures[0] is LARGE for branch in branches if known)


def test_samples_of_texts_stay_the_same_objects() -> None:
    samples = make_group(1).samples
    assert all(one is other for one, other in zip(slim(samples), samples, strict=True))
    assert all(one is other for one, other in zip(restored(samples), samples, strict=True))
