"""Why a prompt has no attempt in the ledger of a run: not reached yet, filtered by its length, or not in the data."""

from __future__ import annotations

from pathlib import Path

from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.prompt_limit import PromptLimit, prompt_limit
from miles_async.errors import ConfigurationError, DataError
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate, load_tokenizer
from miles_async.runtime.files.run_directory import CONFIG_FILE


def why_never_issued(run_dir: Path, prompt_id: str, issued: int) -> tuple[str, bool]:
    """Explain why the ledger of ``run_dir`` lacks a prompt: (a clause, whether the prompt exists).

    The data and the tokenizer are read from where the run's configuration says, relative paths from here. ``issued``:
    prompts in the ledger.
    """
    try:
        source, limit = _source(run_dir)
    except (ConfigurationError, DataError) as error:
        return f"whether it exists cannot be told: {error}", False
    place = source.find(prompt_id)
    if place is None:
        return f"it never existed: {source.path} has no such prompt", False
    if limit is not None and place.tokens > limit.tokens:
        return f"it was filtered by length: it has {place.tokens} tokens, and {limit.reason}", True
    where = f"number {place.position} of {len(source)} in the first epoch"
    return f"it was not reached: it is {where}, and {issued} prompts have been issued", True


def _source(run_dir: Path) -> tuple[FilePromptSource, PromptLimit | None]:
    arguments = parse_arguments(["--config", str(run_dir / CONFIG_FILE)]).arguments
    if (model := arguments.model.hf_checkpoint) is None:
        raise ConfigurationError(f"{run_dir / CONFIG_FILE} names no --hf-checkpoint")
    tokenizer = load_tokenizer(model, arguments.model.trust_remote_code)
    template = ChatTemplate(tokenizer, arguments.data.apply_chat_template)
    limit = prompt_limit(arguments)
    return FilePromptSource(arguments.data, template.encode, limit), limit
