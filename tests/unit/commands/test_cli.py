"""``miles-async`` from the outside: exit codes, messages, nothing heavy loaded before flags are checked."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import pytest

import miles_async
from miles_async import __version__
from miles_async.arguments import Arguments
from miles_async.arguments.data import DataArguments
from miles_async.arguments.model import ModelArguments
from miles_async.arguments.parser import EPILOG
from miles_async.checkpoints.manifest import RunIdentity, fingerprint, write_manifest
from miles_async.cli import COMMANDS, main
from miles_async.errors import ConfigurationError, ContractViolation, TrainerError
from miles_async.prompts.source import FilePromptSource
from miles_async.prompts.tokenizers import load_tokenizer
from miles_async.runs.launch import launch
from miles_async.runtime.processes.run_process import MARK
from miles_async.wiring import early_imports
from tests.unit.commands.command_line import printed, refused

MODEL = Path(__file__).resolve().parents[3] / "examples" / "quickstart" / "assets" / "reverse" / "model"


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is no run, and nobody uses what is imported early."""
    monkeypatch.setenv(MARK, "")  # restored at the end
    monkeypatch.setattr(early_imports, "COMMON", ())


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    model = shutil.copytree(MODEL, tmp_path / "model")
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"rev {i}", "label": f"{i}"}) + "\n" for i in range(9)))
    return [
        "train", "--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--rm-type", "exact_match",
        "--max-weight-staleness", "2", "--use-rollout-logprobs", "--rollout-max-response-len", "32", "--device", "cpu",
        "--run-dir", str(tmp_path / "runs" / "latest"),
    ]  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """Arguments of the calls of ``wiring.driver_process.run``, which returns 0 or raises what ``raises`` holds."""
    calls: list[Arguments] = []
    module = types.ModuleType("miles_async.wiring.driver_process")

    def run(arguments: Arguments, imports: object) -> int:
        calls.append(arguments)
        return 0

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miles_async.wiring.driver_process", module)
    return calls


def test_version_and_help(capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, "--version") == f"miles-async {__version__}\n"
    assert "Examples:" in printed(capsys, "--help")
    assert main([]) == 2


def test_a_broken_contract_is_reported_as_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def train(words: Sequence[str]) -> int:
        raise ContractViolation("the ledger and the pool disagree about [3]")

    monkeypatch.setitem(COMMANDS, "train", train)  # type: ignore[arg-type]
    assert main(["train"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: the ledger and the pool disagree about [3]",
        "This is a bug of miles_async: please report it with logs/ of the run directory.",
    ]


def test_a_package_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def train(words: Sequence[str]) -> int:
        raise ImportError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setitem(COMMANDS, "train", train)  # type: ignore[arg-type]
    assert main(["train"]) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback")
    problem = "a package does not load: libcudnn.so.9: cannot open shared object file"
    assert last == f"error: {problem}; `miles-async doctor` says how to mend it"


def test_unknown_command_suggests(capsys: pytest.CaptureFixture[str]):
    assert "error: unknown command trian; did you mean train?" in refused(capsys, "trian")


def test_a_program_has_what_the_command_line_has(
    flags: list[str],
    runs: list[Arguments],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    words = [*flags[1:], "--lr", "1e-4", "--prompt-data", "train.jsonl"]
    config, shown = miles_async.Config.from_args(words), list[str]()
    with chdir("/"):
        checked = miles_async.check(config)
    assert checked == printed(capsys, "train", *words, "--dry-run")
    assert main(["train", *words]) == launch(config, shown.append) == 0
    assert "".join(shown) == capsys.readouterr().out
    by_command, by_program = runs
    assert by_command == by_program
    wrong = config.having(hf_checkpoint="absent")
    assert main(["train", *wrong.words, "--dry-run"]) == 2
    with pytest.raises(ConfigurationError) as refused:
        miles_async.check(wrong)
    assert capsys.readouterr().err == f"error: {refused.value}\n"


def test_dry_run_checks_and_starts_nothing(flags: list[str], runs: list[Arguments], capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, *flags, "--dry-run")
    assert "Nothing was started" in out
    assert "(9)" in out
    assert "age at most 2, 3 batch(es) admitted ahead" in out
    assert "1 ranks on cpu: DP 1\n" in out
    split = ("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2")
    assert "4 ranks on cpu: DP 2, TP 2\n" in printed(capsys, *flags, "--dry-run", *split)
    assert not runs


def test_dry_run_tells_of_prompts_that_are_too_long(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """One is skipped, since the model has 128 positions; others outgrow micro-batches, which nothing dies of."""
    prompts = tmp_path / "train.jsonl"
    texts = ["rev " + "1" * length for length in (2, 40, 100)]
    prompts.write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in texts))
    out = printed(capsys, *flags, "--dry-run")
    assert f"  note: {prompts}: 1 of 3 prompts are skipped: they have up to" in out
    assert "--rollout-max-response-len 32 leaves 96 of the model's 128 positions" in out
    assert "separate micro-batches" not in out
    assert main([*flags, "--dry-run", "--max-tokens-per-gpu", "64"]) == 0
    assert "their samples may exceed --max-tokens-per-gpu 64" in capsys.readouterr().out


def test_dry_run_refuses_prompts_that_end_with_the_answers_beginning_where_an_environment_begins_with_a_turn(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prompts = tmp_path / "train.jsonl"
    messages = [{"role": "user", "content": "rev 12"}, {"role": "assistant", "content": "2"}]
    prompts.write_text(json.dumps({"prompt": messages, "label": "21"}) + "\n")
    assert main([*flags, "--dry-run"]) == 0
    environment = ["--environment-path", "examples.search_agent.environment:SearchEnvironment"]
    assert main([*flags, "--dry-run", *environment]) == 2
    assert f"{prompts}:1: the last message is the assistant's, whose turn comes next" in capsys.readouterr().err


def test_print_config_reads_back(
    flags: list[str], runs: list[Arguments], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = printed(capsys, *flags, "--lr", "3e-4", "--print-config")
    (tmp_path / "run.toml").write_text(out)
    assert printed(capsys, "train", "--config", str(tmp_path / "run.toml"), "--print-config") == out
    assert main(["train", "--config", str(tmp_path / "run.toml")]) == 0
    assert runs[0].optimizer.lr == 3e-4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-weight-stalenes", "2"], "did you mean --max-weight-staleness?"),
        (["--lr", "-1e-4"], "--lr: expected more than 0 and at most 1, found -0.0001"),
        (["--label-key", "answer"], "train.jsonl:1: no key 'answer' (--label-key"),
        (["@absent.args"], "no argument file absent.args"),
        (["--custom-rm-path", "absent_module:f", "--rm-type", "none"], "no module 'absent_module'"),
        (["--run-dir", "/", "--dry-run"], "--run-dir /: the working directory"),
        (["--run-dir", "docs", "--dry-run"], "found files and no run.json"),
    ],
)
def test_settings_that_cannot_work_end_with_2_and_start_nothing(
    flags: list[str], runs: list[Arguments], capsys: pytest.CaptureFixture[str], extra: list[str], message: str
):
    assert main([*flags, *extra]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""
    assert not runs


def test_a_run_begins_where_it_will_resume_and_nothing_is_saved_yet(
    flags: list[str], runs: list[Arguments], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save, other = tmp_path / "checkpoints", tmp_path / "other"
    for made in (False, True):
        both = [*flags, "--save", str(save), "--load", f"{save}/"]
        dry = printed(capsys, *both, "--dry-run")
        assert f"  note: --load {save}: no checkpoint there yet, the run begins\n" in dry
        assert "resumes from" not in dry
        assert main(both) == 0
        assert f"note: --load {save}: no checkpoint there yet, the run begins\n" in capsys.readouterr().out
        assert runs.pop().checkpoint.load is None
        assert main([*flags, "--save", str(other), "--load", str(save)]) == 2
        expected = "no checkpoint there (expected a folder iter" if made else "there is no such directory"
        assert f"--load {save}: {expected}" in capsys.readouterr().err
        save.mkdir(exist_ok=True)
    assert not runs


@pytest.mark.parametrize("mode", [["--dry-run"], []], ids=["dry run", "run"])
def test_checkpoints_are_checked_before_anything_starts(
    flags: list[str], runs: list[Arguments], tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: list[str]
):
    # covers: C9
    save = tmp_path / "checkpoints"
    checkpoint = save / "iter_0000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "position.json").write_text('{"run": "earlier", "step": 3}')
    (checkpoint / "groups.msgpack").write_bytes(b"12345")
    model = fingerprint(ModelArguments(hf_checkpoint=Path(flags[flags.index("--hf-checkpoint") + 1])))
    write_manifest(checkpoint, RunIdentity(run="earlier", model=model, ranks={}), 3, {})

    def refusal(*extra: str) -> str:
        assert main([*flags, *extra, *mode]) == 2
        assert not runs
        return capsys.readouterr().err

    assert "holds iter_0000003 of the run earlier: resume it with --load" in refusal("--save", str(save))
    assert main([*flags, "--save", str(save), "--load", str(checkpoint), "--dry-run"]) == 0
    assert f"resumes from   {checkpoint}\n" in capsys.readouterr().out
    data = DataArguments(prompt_data=(flags[flags.index("--prompt-data") + 1],))
    cursor = FilePromptSource(data, lambda *_: ()).state()
    (checkpoint / "rollout.json").write_text(json.dumps({"source": cursor, "pool": {"steps": 3}}))
    write_manifest(checkpoint, RunIdentity(run="earlier", model=model, ranks={}), 3, {})
    assert main([*flags, "--load", str(save), "--dry-run"]) == 0
    capsys.readouterr()
    assert "seed was 42 when the checkpoint was written and is 7 now. Restore --rollout-seed" in refusal(
        "--load", str(save), "--rollout-seed", "7"
    )
    (checkpoint / "groups.msgpack").write_bytes(b"123")
    assert "groups.msgpack has 3 bytes, expected 5" in refusal("--load", str(save))
    write_manifest(checkpoint, RunIdentity(run="earlier", model={**model, "num_attention_heads": 7}, ranks={}), 3, {})
    assert "another model than --hf-checkpoint: expected what was saved, num_attention_heads 7" in refusal(
        "--load", str(save)
    )


def test_broken_line_7_is_named(flags: list[str], runs: list[Arguments], capsys: pytest.CaptureFixture[str]):
    path = Path(flags[flags.index("--prompt-data") + 1])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], "{broken", *lines[7:]]))
    assert main(flags) == 2
    assert f"error: {path}:7: not valid JSON" in capsys.readouterr().err
    assert not runs


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (TrainerError("rank 1 died"), 1, "error: rank 1 died"),
        (ConfigurationError("port taken"), 2, "error: port taken"),
    ],
)
def test_exit_code_tells_how_a_run_ended(
    flags: list[str],
    runs: list[Arguments],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    message: str,
):
    def run(arguments: Arguments, imports: object) -> int:
        raise error

    monkeypatch.setattr(sys.modules["miles_async.wiring.driver_process"], "run", run)
    assert main(flags) == exit_code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--rollout-max-prompt-len", "3"], "all 9 prompts have more than 3 tokens"),
        (["--sglang-mem-fraction-statik", "0.3"], "did you mean --sglang-mem-fraction-static?"),
        (["--sglang-mem-fraction", "0.3"], "did you mean --sglang-mem-fraction-static?"),
        (["--router-polizy", "random"], "did you mean --router-policy?"),
        (["--weight-transport", "ipc", "--device", "cpu"], "--weight-transport ipc works on cuda only"),
        (["--weight-transport", "rsync"], "--weight-transport rsync: expected distributed, disk, object_store, ipc"),
        (["--weight-delta", "xor"], "--weight-delta xor needs files at the engines"),
        (["--run-dir", "/proc/run"], "--run-dir /proc/run: /proc cannot be written to"),
        (["--actor-num-nodes", "2"], "--actor-num-nodes 2 without --ray-address"),
        (
            "--device cpu --recompute-granularity selective --recompute-modules layernorm core_attn".split(),
            "--recompute-modules layernorm: needs Transformer Engine",
        ),
        (["--custom-tracker-path", "no_module:Tracker"], "--custom-tracker-path no_module:Tracker: there is no"),
        (["--agent-command", "no-such-agent --fast"], "there is no program 'no-such-agent'"),
        (["--mcp-server", "no-such-server"], "--mcp-server no-such-server: there is no program 'no-such-server'"),
        (["--device", "cuda", "--rollout-num-gpus", "1000"], "1001 GPUs are asked for and this machine has"),
        (["--device", "cuda", "--sglang-enable-nccl-nvls"], "export NCCL_NVLS_ENABLE=1"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_settings_that_would_fail_later(
    flags: list[str], runs: list[Arguments], capsys: pytest.CaptureFixture[str], extra: list[str], message: str
):
    assert message in refused(capsys, *flags, *extra, "--dry-run")
    if "prompts" not in message:  # what takes seconds to know is checked by the rollout process, before engines
        assert main([*flags, *extra]) == 2
    assert not runs


def test_a_dry_run_refuses_variables_that_megatron_would_find_wrong(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert "NVTE_FUSED_ATTN=0 in the environment" in refused(capsys, *flags, "--device", "cuda", "--dry-run")


def change_config(flags: list[str], **changes: object) -> Path:
    model = Path(flags[flags.index("--hf-checkpoint") + 1])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    return model


def test_a_dry_run_refuses_a_model_that_cannot_be_trained(flags: list[str], capsys: pytest.CaptureFixture[str]):
    change_config(flags, model_type="mamba")
    assert "model_type 'mamba' is not trained" in refused(capsys, *flags, "--dry-run")


def test_a_dry_run_says_what_becomes_of_layers_for_multi_token_prediction(
    flags: list[str], capsys: pytest.CaptureFixture[str]
):
    change_config(flags, num_nextn_predict_layers=1)
    assert main([*flags, "--dry-run"]) == 0
    note = "num_nextn_predict_layers 1 of config.json: layers for multi-token prediction are neither trained"
    assert note in capsys.readouterr().out
    assert main([*flags, "--mtp-num-layers", "1", "--dry-run"]) == 0
    assert main([*flags, "--mtp-num-layers", "2", "--dry-run"]) == 2
    assert "config.json of --hf-checkpoint says num_nextn_predict_layers 1" in capsys.readouterr().err
    assert main([*flags, "--enable-mtp-training", "--dry-run"]) == 2
    assert "of model_type 'qwen3' were not compared with plain ones" in capsys.readouterr().err


def test_a_dry_run_refuses_weights_that_are_not_those_of_the_config(
    flags: list[str], capsys: pytest.CaptureFixture[str]
):
    change_config(flags, vocab_size=65)
    assert main([*flags, "--dry-run"]) == 2
    assert "model.embed_tokens.weight is [64, 128], and by config.json [65, 128]" in capsys.readouterr().err


def test_a_dry_run_refuses_rows_of_roles_that_the_template_does_not_know(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    row = {"prompt": [{"role": "humann", "content": "rev 1"}], "label": "1"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert main([*flags, "--dry-run"]) == 2
    assert "train.jsonl:1: expected messages of the roles assistant, dev" in (told := capsys.readouterr().err)
    assert "found role 'humann'" in told


def test_a_dry_run_refuses_a_template_that_does_not_end(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("miles_async.prompts.templates.RENDER_SECONDS", 0.5)
    template = change_config(flags) / "chat_template.jinja"
    loop = "{% for i in range(10**5) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"  # minutes
    template.write_text(loop + template.read_text())
    assert f"the chat template {template} takes more than 0.5 s" in refused(capsys, *flags, "--dry-run")
    template.write_text(template.read_text().replace("10**5", "10**9"))
    load_tokenizer.cache_clear()
    assert "the chat template refuses this conversation: Range too big" in refused(capsys, *flags, "--dry-run")


def test_a_dry_run_tells_of_turns_that_nothing_ends(flags: list[str], capsys: pytest.CaptureFixture[str]):
    model = change_config(flags)
    assert "ends the assistant's turn" not in printed(capsys, *flags, "--dry-run")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    end, end_id = tokenizer["eos_token"], load_tokenizer(model).eos_token_id
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ eos_token }}", end))
    (model / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": tokenizer["pad_token"]}))
    for name in ("generation_config.json", "config.json"):
        if (path := model / name).exists():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    load_tokenizer.cache_clear()
    told = printed(capsys, *flags, "--dry-run")
    assert f"ends the assistant's turn with {end!r}, and engines stop at {tokenizer['pad_token']!r}: a response" in told
    assert f"add {end_id} to eos_token_id in generation_config.json, or give --rollout-stop '{end}'" in told
    assert "ends the assistant's turn" not in printed(capsys, *flags, "--rollout-stop", end, "--dry-run")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end_id]}))
    assert "ends the assistant's turn" not in printed(capsys, *flags, "--dry-run")


def test_a_dry_run_refuses_a_model_without_tokenizer_or_template(flags: list[str], capsys: pytest.CaptureFixture[str]):
    model = change_config(flags)
    (model / "chat_template.jinja").unlink()
    assert "has no chat template; use --no-apply-chat-template" in refused(capsys, *flags, "--dry-run")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    load_tokenizer.cache_clear()
    assert "no usable tokenizer there" in refused(capsys, *flags, "--dry-run")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which nothing may be looked up, by root neither."""
    directory, stat = Path("/proc/closed"), os.stat

    def refusing(path: object, **keywords: object) -> os.stat_result:
        if str(path).startswith(str(directory)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **keywords)

    monkeypatch.setattr("os.stat", refusing)
    return directory


@pytest.mark.parametrize("flag", ["--run-dir", "--save", "--load", "--hf-checkpoint", "--prompt-data"])
def test_paths_that_may_not_be_looked_at_are_problems_with_flags(
    flags: list[str], closed: Path, flag: str, capsys: pytest.CaptureFixture[str]
):
    assert f"{flag} {closed / 'inside'}: " in refused(capsys, *flags, "--dry-run", flag, str(closed / "inside"))


def test_outputs_never_overwrite_inputs(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*flags, "--dry-run", "--save-hf", str(tmp_path / "runs" / ".." / "model")]) == 2
    assert "model is --hf-checkpoint, which it would overwrite" in capsys.readouterr().err
    assert main([*flags, "--dry-run", "--save", str(tmp_path / "runs" / "latest" / "checkpoints")]) == 2
    assert "checkpoints is inside --run-dir" in capsys.readouterr().err


HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "pyarrow", "aiohttp")


@pytest.mark.parametrize(
    "words", [["train", "--help"], ["train", "--help-all"], ["train", "--foo"], ["train"]], ids=str
)
def test_help_and_errors_load_nothing_heavy(words: list[str]):
    code = (
        "import sys\nfrom miles_async.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "LOADED []" in done.stdout


def test_a_terminal_without_the_characters_gets_question_marks():
    code = "import sys; from miles_async.cli import main; sys.exit(main(['train', '--help-all']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=30, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--kl-loss-coef ? KL" in done.stdout


def test_examples_in_the_help_keep_their_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help-all"])
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("  miles-async train")] == EPILOG.splitlines()[1:]


def test_python_m_works():
    command = [sys.executable, "-m", "miles_async", "train", "--foo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown flag --foo")
