"""A model laid out as Kimi-K2, whose tokenizer is code of its own, from the dry run to a resumed run.

# covers: M22
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_async.prompts.templates import ChatTemplate
from miles_async.prompts.tokenizers import load_tokenizer
from tests.fakes.kimi_files import BASE, SPECIAL, VOCABULARY, odd_tokens, write_kimi_files
from tests.integration.real_run import RealRun, real_run
from tests.integration.tiny_models import save_tiny

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

RUN_SECONDS = 300.0
SMALL = (
    *("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--rollout-batch-size", "4"),
    *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "8"),
    *("--eval-prompt-data", "none", "--eval-interval", "none"),
    *("--rm-type", "none", "--custom-rm-path", f"{odd_tokens.__module__}:{odd_tokens.__name__}"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny("kimi-k2", tmp_path_factory.mktemp("kimi") / "model", vocab_size=VOCABULARY)
    write_kimi_files(directory)
    return directory


def ended(run_dir: Path, command: tuple[str, ...], *flags: str, code: int = 0) -> RealRun:
    with real_run(run_dir, *SMALL, *flags, command=command) as run:
        assert run.wait(RUN_SECONDS) == code, run.output
    return run


def test_its_code_runs_with_the_flag_alone_in_every_process_and_survives_export_and_resume(
    model: Path, tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    source = ("--hf-checkpoint", str(model))
    refused = ended(tmp_path / "refused", imported_reverse, *source, "--num-rollout", "2", "--dry-run", code=2)
    assert "tokenization_kimi.py" in refused.output
    assert "--trust-remote-code" in refused.output

    trusted = (*source, "--trust-remote-code", "--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    checked = ended(tmp_path / "checked", imported_reverse, *trusted, "--num-rollout", "2", "--dry-run")
    assert "tiktoken" not in checked.output
    exported = tmp_path / "exported"
    run = ended(tmp_path / "run", imported_reverse, *trusted, "--num-rollout", "2", "--save-hf", str(exported))
    assert (run.summary["steps"], run.summary["balanced"]) == (2, True)
    assert run.summary["logprob_diff"]["max"] < 1e-3

    for name in ("tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (model / name).read_bytes()
    chat = ChatTemplate(load_tokenizer(exported, trust_remote_code=True), apply_chat_template=True)
    assert chat.stop_ids == {BASE + SPECIAL["[EOS]"], BASE + SPECIAL["<|im_end|>"]}
    assert chat.decode_all(chat.tokenize("the <|tool_calls_section_begin|>12<|im_end|>")).endswith("12<|im_end|>")

    load = ("--load", str(tmp_path / "checkpoints"), "--num-rollout", "3")
    resumed = ended(tmp_path / "resumed", imported_reverse, *trusted, *load)
    assert (resumed.summary["steps"], resumed.summary["balanced"]) == (1, True)
