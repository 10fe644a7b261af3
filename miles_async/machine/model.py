"""A model directory, as far as it can be judged without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from miles_async.arguments.model_files import directory_problems, read_config
from miles_async.errors import ConfigurationError
from miles_async.machine.finding import Finding

_MEND = "hf download <model> --local-dir "


def model_findings(directory: Path) -> Iterator[Finding]:
    """Check that the directory holds a whole model of a family that can be trained."""
    from miles_async.backends.megatron.families.hf_config import check_model

    problems = list(directory_problems(directory, "--hf-checkpoint"))
    for problem in problems:
        yield Finding(check="model", verdict="failure", found=problem, mend=f"{_MEND}{directory}")
    if problems:
        return
    try:
        check_model(config := read_config(directory), directory)
    except ConfigurationError as error:
        yield Finding(check="model", verdict="failure", found=str(error), mend="choose a model that can be trained")
    else:
        kind = config.get("model_type", "unknown")
        yield Finding(check="model", verdict="ok", found=f"{directory}: whole, of the family {kind}")
