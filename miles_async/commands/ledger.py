"""``miles-async ledger`` and ``miles-async explain``: the outcome of every attempt of a run.

Both only read the run: during it, after it, and after a crash (up to the last flush). ``--readmit`` writes a request
next to the checkpoints, for the next ``--load``.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.prompt_limit import PromptLimit, prompt_limit
from miles_async.checkpoints.files import find_checkpoint
from miles_async.commands.parser import CommandParser
from miles_async.errors import CheckpointError, ConfigurationError, DataError, LedgerError
from miles_async.ledger.reader import LedgerReader, open_ledger
from miles_async.ledger.readmission import request_readmission
from miles_async.ledger.story import tell
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.rollout.checkpoint import read_state
from miles_async.runtime.files.run_directory import CONFIG_FILE, LEDGER_FILE, check_directory
from miles_async.runtime.processes.restarts import read_restarts
from miles_async.staleness.attempts import DeadLetter, dead_letter
from miles_async.staleness.events import Restored
from miles_async.staleness.ledger import Balance, Ledger
from miles_async.staleness.pool import PoolState

ALL = "all"
MAX_REASONS = 20  # number of reasons printed, the most frequent first; errors of engines may all differ


def ledger(words: Sequence[str]) -> str:
    """Return the output of ``miles-async ledger``.

    Raises:
        ConfigurationError: there is no such directory or prompt; the message has the nearest one.
        LedgerError: the ledger cannot be read, or its balance does not add up.
    """
    parser = CommandParser(
        prog="miles-async ledger",
        description="Show how the attempts of a run ended, by outcome and reason, and check that none is missing.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run directory, or a directory of checkpoints")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dead-letter", action="store_true", help="list quarantined prompts, with their reasons")
    which.add_argument(
        "--readmit",
        nargs="+",
        metavar="PROMPT",
        help="give quarantined prompts (ids, or all) another budget when the run is resumed with --load",
    )
    parsed = parser.parse_args(words)
    check_directory(parsed.directory)
    if parsed.readmit:
        return _readmit(parsed.directory, parsed.readmit)
    if parsed.dead_letter:
        return _show_dead_letters(_dead_letters(parsed.directory).values())
    if not (parsed.directory / LEDGER_FILE).is_file():
        checkpoint, pool = _checkpoint(parsed.directory)
        return f"{checkpoint}, when it was written:\n" + _show_balance(Ledger.saved_balance(pool.ledger))
    with open_ledger(_ledger_file(parsed.directory)) as reader:
        carried = reader.carried()
        shown = _show_balance(reader.balance(), carried.balance.issued if carried else 0)
        restarts = "".join(f"{restart}\n" for restart in read_restarts(parsed.directory))
        changes = "".join(f"set {change}\n" for change in reader.changes())
        return shown + _show_lengths(reader) + _show_epochs(reader) + changes + _show_accepted(carried) + restarts


def explain(words: Sequence[str]) -> str:
    """Return the output of ``miles-async explain``. Raises as :func:`ledger` does."""
    parser = CommandParser(
        prog="miles-async explain",
        description="Show what happened to a prompt, attempt by attempt, or to one attempt and its samples.",
    )
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="a run directory")
    parser.add_argument("subject", metavar="PROMPT_OR_ATTEMPT", help="id of a prompt, or number of an attempt")
    parsed = parser.parse_args(words)
    check_directory(parsed.directory)
    with open_ledger(_ledger_file(parsed.directory)) as reader:
        records = reader.find(parsed.subject)
        if not records:
            raise ConfigurationError(f"{parsed.directory}: {_not_found(reader, parsed.subject, parsed.directory)}")
        started_at = reader.started_at()
        stories = [tell(r, started_at=started_at, came_again_as=reader.next_attempt(r)) for r in records]
        return "\n\n".join(stories) + f"\n{_carried_note(reader)}"


# ------------------------------------------------------------------------------------------------------- directories
def _ledger_file(directory: Path) -> Path:
    path = directory / LEDGER_FILE
    if not path.is_file():
        raise ConfigurationError(f"expected a run directory with a {LEDGER_FILE}, found none in {directory}")
    return path


def _save_directory(directory: Path) -> Path:
    """Find the checkpoints: in ``--save`` of the run in ``directory``, in ``directory`` itself, or around it."""
    if not (directory / LEDGER_FILE).is_file():
        return find_checkpoint(directory).directory.parent
    try:
        config = tomllib.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        save = config["checkpoint"]["save"]
    except (OSError, KeyError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(
            f"{directory / CONFIG_FILE} does not say where the checkpoints are ({error!r}); name the directory of "
            "--save instead"
        ) from None
    if save == "none":
        raise ConfigurationError(f"the run in {directory} writes no checkpoints (--save): it cannot be resumed")
    return Path(save)


def _checkpoint(directory: Path) -> tuple[Path, PoolState]:
    """Return the newest checkpoint in ``directory``, and the state of its pool."""
    try:
        checkpoint = find_checkpoint(directory).directory
        return checkpoint, read_state(checkpoint).pool
    except CheckpointError:
        raise ConfigurationError(
            f"expected a run directory ({LEDGER_FILE}) or checkpoints (iter_...), found neither in {directory}"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"cannot read the newest checkpoint in {directory}: {error!r}") from error


# ---------------------------------------------------------------------------------------------------------- balance
def _show_balance(balance: Balance, carried: int = 0) -> str:
    """``carried``: attempts that were issued before --load."""
    summary = balance.summary()
    issued = summary.pop("issued")
    width = max(len(str(issued)), 6)
    lines = [f"{issued:>{width}}  issued" + (f", {carried} of them before --load" if carried else "")]
    lines += [f"{count:>{width}}  {name.replace('_', ' ')}" for name, count in summary.items() if count]
    total = sum(summary.values())
    if total != issued:
        raise LedgerError(f"{issued} attempts were issued and {total} are accounted for: {balance}")
    lines.append(f"balanced: issued = {' + '.join(str(count) for count in summary.values() if count) or 0}")
    return "\n".join([*lines, *_show_reasons(balance, width)]) + "\n"


def _show_lengths(reader: LedgerReader) -> str:
    """Compare lengths of discarded and trained responses: discarding favours short ones (C5)."""
    lengths = reader.response_lengths()
    if not lengths:
        return ""
    lines = ["", "response lengths (tokens)", "   mean  longest  samples"]
    lines += [f"{x.mean:>7.1f}  {x.longest:>7}  {x.samples:>7}  {x.where.replace('_', ' ')}" for x in lengths]
    return "\n".join(lines) + "\n"


def _show_reasons(balance: Balance, width: int) -> list[str]:
    if not balance.reasons:
        return []
    reasons = sorted(balance.reasons.items(), key=lambda item: (-item[1], item[0]))
    lines = ["", "reasons"]
    lines += [f"{count:>{width}}  {reason.replace('_', ' ', 1)}" for reason, count in reasons[:MAX_REASONS]]
    if rest := reasons[MAX_REASONS:]:
        lines.append(f"{sum(count for _, count in rest):>{width}}  {len(rest)} other reasons")
    return lines


# ----------------------------------------------------------------------------------------------------- dead letters
def _dead_letters(directory: Path) -> dict[str, DeadLetter]:
    """Dead letters by prompt id: of the run, or of the newest checkpoint if it is not a run directory."""
    if (directory / LEDGER_FILE).is_file():
        with open_ledger(directory / LEDGER_FILE) as reader:
            return {letter.prompt_id: letter for letter in reader.dead_letters()}
    _, pool = _checkpoint(directory)
    return {retry.prompt.prompt_id: dead_letter(retry) for retry in pool.book.quarantined}


def _show_dead_letters(letters: Iterable[DeadLetter]) -> str:
    lines: list[str] = []
    for letter in letters:
        lines += [f"{letter.prompt_id} (epoch {letter.epoch})", *(f"  {reason}" for reason in letter.reasons)]
    return "\n".join(lines or ["no prompt is quarantined"]) + "\n"


def _readmit(directory: Path, wanted: Sequence[str]) -> str:
    letters = _dead_letters(directory)
    if not letters:
        raise ConfigurationError(f"{directory}: no prompt is quarantined, so none can be readmitted")
    prompt_ids = list(letters) if list(wanted) == [ALL] else list(dict.fromkeys(wanted))
    for prompt_id in prompt_ids:
        if prompt_id not in letters:
            nearest = difflib.get_close_matches(prompt_id, letters, n=1) or list(letters)[:1]
            raise ConfigurationError(f"{directory}: {prompt_id} is not quarantined; did you mean {nearest[0]}?")
    save = _save_directory(directory)
    path = request_readmission(save, prompt_ids)
    return f"{path}: the next run with --load {save} gives {', '.join(prompt_ids)} another budget\n"


# ---------------------------------------------------------------------------------------------------------- stories
def _not_found(reader: LedgerReader, subject: str, directory: Path) -> str:
    known = reader.attempt_range()
    if known is None:
        return "no attempt has been issued yet"
    message = f"no prompt and no attempt {subject!r} in this ledger (attempts {known[0]} to {known[1]})"
    if subject.isdecimal():
        return message + _carried_note(reader)
    why, exists = _why_never_issued(directory, subject, reader.prompts_issued())
    nearest = None if exists else reader.nearest_prompt(subject)
    return f"{message}; {why}" + (f"; did you mean {nearest}?" if nearest else "") + _carried_note(reader)


def _why_never_issued(run_dir: Path, prompt_id: str, issued: int) -> tuple[str, bool]:
    """Explain why the ledger of ``run_dir`` lacks a prompt: (a clause, whether the prompt exists).

    The data and the tokenizer are read from where the run's configuration says, relative paths from here. ``issued``:
    prompts in the ledger.
    """
    try:
        source, limit = _prompts(run_dir)
    except (ConfigurationError, DataError) as error:
        return f"it is unknown whether it exists: {error}", False
    found = source.find(prompt_id)
    if found is None:
        return f"it never existed: {source.name} has no such prompt", False
    position, tokens = found
    if limit is not None and tokens > limit.tokens:
        return f"it was filtered by length: it has {tokens} tokens, and {limit.reason}", True
    where = f"number {position} of {len(source)} in the first epoch"
    return f"it was not reached: it is {where}, and {issued} prompts have been issued", True


def _prompts(run_dir: Path) -> tuple[FilePromptSource, PromptLimit | None]:
    arguments = parse_arguments(["--config", str(run_dir / CONFIG_FILE)]).arguments
    if (model := arguments.model.hf_checkpoint) is None:
        raise ConfigurationError(f"{run_dir / CONFIG_FILE} names no --hf-checkpoint")
    tokenizer = load_tokenizer(model, arguments.model.trust_remote_code)
    template = ChatTemplate(tokenizer, arguments.data.apply_chat_template)
    limit = prompt_limit(arguments)
    return FilePromptSource(arguments.data, template.encode, limit), limit


def _carried_note(reader: LedgerReader) -> str:
    carried = reader.carried()
    if carried is None:
        return ""
    issued = carried.balance.issued
    note = f"\n{issued} earlier attempts are in the ledgers of the runs that this one resumed from.\n" if issued else ""
    return note + _show_accepted(carried)


def _show_epochs(reader: LedgerReader) -> str:
    """Epochs of prompts that left rows out, which uniform sampling never does."""
    lines = [
        f"epoch {began.epoch} of prompts ({began.data}): {began.prompts} given, {began.left_out} left out by "
        f"{began.sampler}\n"
        for began in reader.epochs()
        if began.sampler != "uniform"
    ]
    opened = reader.prompts_opened()
    if opened is not None and opened.earlier_rates:
        lines.insert(0, f"pass rates of {opened.earlier_rates} prompts were known from earlier runs (--pass-rates)\n")
    return "\n" + "".join(lines) if lines else ""


def _show_accepted(carried: Restored | None) -> str:
    if carried is None or not carried.accepted:
        return ""
    return f"\nresumed although this has changed, by --load-anyway: {'; '.join(carried.accepted)}\n"
