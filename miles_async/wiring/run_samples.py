"""The recorder of a run's samples, by its flags."""

from __future__ import annotations

from miles_async.arguments import ObservabilityArguments
from miles_async.prompts.templates import ChatTemplate
from miles_async.samples.files import DIRECTORY
from miles_async.samples.recorder import SampleRecorder


def sample_recorder(
    arguments: ObservabilityArguments, template: ChatTemplate, *, sampled: bool = True, only_file: bool = False
) -> SampleRecorder | None:
    """Start the recorder; None with ``--save-samples 0``. ``sampled``, ``only_file``: see there."""
    if not arguments.save_samples:
        return None
    return SampleRecorder(
        arguments.run_dir / DIRECTORY,
        groups=arguments.save_samples,
        limit_bytes=int(arguments.save_samples_gib * 2**30),
        decode=template.decode_all,
        sampled=sampled,
        only_file=only_file,
    )
