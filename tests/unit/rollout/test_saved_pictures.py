"""Images in checkpoints: once per group, and the same afterwards."""

from __future__ import annotations

import msgspec

from miles_async.rollout.saved_pictures import restored, slim
from miles_async.runtime.serialization import decode, encode
from miles_async.types import Branch, Group, Picture
from tests.property.builders import make_group

LARGE = Picture(content=bytes(10_000), digest="large", width=56, height=56)
ELSEWHERE = Picture(content=b"of an environment", digest="elsewhere", width=28, height=28)


def group_with(*pictures: Picture) -> Group:
    group = make_group(1, versions=[(0,)] * 4)
    prompt = msgspec.structs.replace(group.attempt.prompt, pictures=(LARGE,))
    samples = [msgspec.structs.replace(sample, pictures=pictures) for sample in group.samples]
    more = Branch(**{name: getattr(samples[0], name) for name in Branch.__struct_fields__})
    samples[0] = msgspec.structs.replace(samples[0], more_branches=(more,))
    attempt = msgspec.structs.replace(group.attempt, prompt=prompt)
    return msgspec.structs.replace(group, attempt=attempt, samples=tuple(samples))


def test_a_group_is_saved_with_each_image_once_and_comes_back_exactly() -> None:  # covers: C9
    group = group_with(LARGE, ELSEWHERE)
    saved = encode(slim(group))
    assert len(saved) < 2 * len(LARGE.content)
    loaded = restored(decode(saved, Group))
    assert encode(loaded) == encode(group)
    [own] = loaded.attempt.prompt.pictures
    assert all(branch.pictures[0] is own for sample in loaded.samples for branch in sample.branches)


def test_groups_of_texts_stay_the_same_objects() -> None:
    group = make_group(1)
    assert slim(group) is group
    assert restored(group) is group
