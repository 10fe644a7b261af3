"""The command line as users meet it: types, precedence, @files, --config, pass-through, and how it fails."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from miles_async.arguments import Arguments
from miles_async.arguments.argument_files import presets
from miles_async.arguments.config_file import to_toml
from miles_async.arguments.help_pages import MOST_NEEDED
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.pass_through import flatten, unflatten
from miles_async.arguments.specification import argument_groups, flag_specifications
from miles_async.arguments.weights import PauseMode
from miles_async.arguments.words import did_you_mean
from miles_async.errors import ConfigurationError
from tests.unit.arguments.refusals import refusal


def parse(*words: str) -> Arguments:
    return parse_arguments(words).arguments


class TestTypes:
    def test_nothing_given_is_all_defaults(self):
        assert parse() == Arguments()

    def test_annotation_gives_the_type(self):
        arguments = parse(
            "--lr", "1e-5", "--num-rollout", "7", "--hf-checkpoint", "models/x", "--wandb-group", "a b",
            "--rollout-stop", "\n", "END", "--use-wandb", "--no-progress", "--rollout-top-k", "-1",
        )  # fmt: skip
        assert arguments.optimizer.lr == 1e-5
        assert arguments.rollout.num_rollout == 7
        assert arguments.model.hf_checkpoint == Path("models/x")
        assert arguments.observability.wandb_group == "a b"
        assert arguments.rollout.rollout_stop == ("\n", "END")
        assert arguments.observability.use_wandb is True
        assert arguments.observability.progress is False
        assert arguments.rollout.rollout_top_k == -1

    def test_whole_numbers_have_64_bits(self):
        """``--seed $(date +%s%N)`` has 61."""
        assert parse("--seed", str(2**63 - 1)).model.seed == 2**63 - 1
        assert parse("--rollout-seed", str(2**60 + 1)).data.rollout_seed == 2**60 + 1

    def test_none_is_a_value_of_optional_flags(self):
        arguments = parse("--max-weight-staleness", "none", "--label-key", "none", "--load", "none")
        assert arguments.staleness.max_weight_staleness is None
        assert arguments.data.label_key is None
        assert arguments.checkpoint.load is None

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--lr", "fast"], "--lr: expected a number, found 'fast'"),
            (["--lr", "nan"], "--lr: expected a number, found 'nan'"),
            (["--num-rollout", "2.5"], "--num-rollout: expected a whole number, found '2.5'"),
            (["--num-rollout", "none"], "--num-rollout: expected a whole number, found 'none'"),
            (["--max-weight-staleness", "x"], "expected a whole number or \"none\", found 'x'"),
            (["--device", "gpu"], "--device: expected one of auto, cpu, cuda; found 'gpu'"),
            (["--recompute-granularity", "ful"], "one of full, selective, none; found 'ful'; did you mean full?"),
            (["--advantage-estimator", "GRPO"], "module:attr; found 'GRPO'; did you mean grpo?"),
            (["--wandb-mode", "ofline"], "offline, disabled, none; found 'ofline'; did you mean offline?"),
            (["--pause-generation-mode", "in-place"], "retract, in_place; found 'in-place'; did you mean in_place?"),
            (["--lr"], "--lr: expected one argument"),
            (["--seed", "9" * 99], f"--seed: expected a whole number of at most {2**63 - 1}, found {'9' * 40}"),
            (["--lr", "-inf"], "--lr: expected a number, found '-inf'"),
            (["--lr", "-1x"], "--lr: expected a number, found '-1x'"),
            (["reverse.args"], "unexpected argument 'reverse.args'"),
            (["--run-dir", "~no-such-user/runs"], "expected a path, found '~no-such-user/runs': there is no such user"),
            (["--rollout-stop", "@user"], "no argument file user; the text '@user' is written @@user"),
            (["@~no-such-user/a.args"], "there is no argument file ~no-such-user/a.args"),
            (["--run-dir", "$HOME/runs"], "--run-dir: expected a path, found '$HOME/runs': variables are not expanded"),
        ],
    )
    def test_wrong_value_names_flag_expected_and_found(self, words: list[str], message: str):
        assert message in refusal(*words)

    @pytest.mark.parametrize("text", ["-1", "-.5", "-1e-4", "-2.5E+3"])
    def test_negative_numbers_are_values_in_every_notation(self, text: str):
        assert parse("--lr", text, "--num-rollout", "3").optimizer.lr == float(text)

    def test_arguments_are_frozen(self):
        arguments = parse()
        with pytest.raises(dataclasses.FrozenInstanceError):
            arguments.staleness.max_weight_staleness = 3  # type: ignore[misc]

    def test_every_field_is_a_flag_with_help(self):
        collected = {"sglang_extra", "router_extra", "megatron_extra"}
        fields = {field.name for group in argument_groups().values() for field in dataclasses.fields(group)}
        assert set(flag_specifications()) == fields - collected
        assert all(specification.help for specification in flag_specifications().values())


class TestUnknownFlags:
    """# covers: P8"""

    def test_misspelt_flag_suggests_the_nearest(self):
        assert "did you mean --max-weight-staleness?" in refusal("--max-weight-stalenes", "2")
        assert "did you mean --max-weight-staleness?" in refusal("--max_weight_staleness", "2")
        assert "did you mean --no-progress?" in refusal("--no-progres")

    @pytest.mark.parametrize(
        ("flag", "says"),
        [
            ("--lerning-rate", "did you mean --learning-rate? it does not exist here either: use --lr"),
            (
                "--balanc-data",
                "did you mean --balance-data? a flag of slime, miles: tokens always are balanced over "
                "data-parallel ranks",
            ),
            ("--batch-size", "did you mean --global-batch-size or --rollout-batch-size?"),
            ("--temperature", "did you mean --eval-temperature or --rollout-temperature?"),
            ("--save-file", "did you mean --save?"),
            ("--group-size", "`miles-async train --help-all` lists the flags"),
            ("--tp", "`miles-async train --help-all` lists the flags"),
        ],
    )
    def test_only_flags_that_are_close_or_share_the_words_are_suggested(self, flag: str, says: str):
        assert refusal(flag, "1") == f"unknown flag {flag}; {says}"

    def test_abbreviation_is_not_accepted(self):
        assert "unknown flag --rollout-batch" in refusal("--rollout-batch", "4")

    def test_all_unknown_flags_are_reported_together(self):
        message = refusal("--lrr", "1", "--release-train", "--frobnicate=2")
        assert "3 problems" in message
        assert all(flag in message for flag in ("--lrr", "--release-train", "--frobnicate"))


class TestArgumentFiles:
    def test_words_as_a_shell_would_read_them(self, tmp_path: Path):
        file = tmp_path / "a.args"
        file.write_text(
            "# don't stumble over quotes in comments\n"
            "--lr 1e-4 --num-rollout 3   # two on a line\n"
            "--wandb-group 'two words' --wandb-project a#b \\\n"
            "\n"
            "--rollout-stop '#' \"x y\"\n"
        )
        arguments = parse(f"@{file}")
        assert (arguments.optimizer.lr, arguments.rollout.num_rollout) == (1e-4, 3)
        assert arguments.observability.wandb_group == "two words"
        assert arguments.observability.wandb_project == "a#b"
        assert arguments.rollout.rollout_stop == ("#", "x y")

    def test_a_byte_order_mark_is_no_part_of_the_first_word(self, tmp_path: Path):
        (tmp_path / "a.args").write_text("--lr 1", encoding="utf-8-sig")
        (tmp_path / "run.toml").write_text("num-rollout = 4", encoding="utf-8-sig")
        arguments = parse(f"@{tmp_path}/a.args", "--config", f"{tmp_path}/run.toml")
        assert (arguments.optimizer.lr, arguments.rollout.num_rollout) == (1, 4)

    def test_variables_are_not_expanded_and_the_home_of_a_path_is(self, tmp_path: Path):
        (tmp_path / "a.args").write_text("--rollout-stop '$HOME' --run-dir ~/runs")
        arguments = parse(f"@{tmp_path}/a.args")
        assert arguments.rollout.rollout_stop == ("$HOME",)
        assert arguments.observability.run_dir == Path.home() / "runs"

    def test_the_last_mention_wins(self, tmp_path: Path):
        (tmp_path / "a.args").write_text("--lr 1")
        assert parse(f"@{tmp_path}/a.args", "--lr", "2").optimizer.lr == 2
        assert parse("--lr", "2", f"@{tmp_path}/a.args").optimizer.lr == 1

    def test_nested_file_is_relative_to_its_includer_other_paths_are_not(self, tmp_path: Path):
        (tmp_path / "inner").mkdir()
        (tmp_path / "outer.args").write_text("@inner/one.args\n--num-rollout 5")
        (tmp_path / "inner" / "one.args").write_text("@two.args")
        (tmp_path / "inner" / "two.args").write_text("--prompt-data data/train.jsonl")
        arguments = parse(f"@{tmp_path}/outer.args")
        assert arguments.data.prompt_data == ("data/train.jsonl",)
        assert arguments.rollout.num_rollout == 5

    def test_missing_file_is_named_with_its_includer(self, tmp_path: Path):
        assert "@none.args: there is no argument file none.args" in refusal("@none.args")
        (tmp_path / "outer.args").write_text("@inner.args")
        message = refusal(f"@{tmp_path}/outer.args")
        assert str(tmp_path / "inner.args") in message
        assert "outer.args" in message

    def test_cycle_and_open_quote_are_errors(self, tmp_path: Path):
        (tmp_path / "a.args").write_text("@b.args")
        (tmp_path / "b.args").write_text("@a.args")
        assert "include each other" in refusal(f"@{tmp_path}/a.args")
        (tmp_path / "c.args").write_text("--lr 1\n--wandb-group 'open")
        assert "c.args:2: No closing quotation" in refusal(f"@{tmp_path}/c.args")

    @pytest.mark.parametrize("preset", presets())
    def test_presets_parse_by_name(self, preset: str):
        assert parse(f"@preset:{preset}") != Arguments()

    def test_every_preset_has_a_name_of_its_own(self):
        assert len(presets()) == len(list(Path("arguments/presets").rglob("*.args")))

    def test_an_unknown_preset_is_answered_with_those_there_are(self, tmp_path: Path):
        (tmp_path / "a.args").write_text("@preset:qwen3-4bb")
        message = refusal(f"@{tmp_path}/a.args")
        assert "@preset:qwen3-4bb: there is no such preset; expected one of " in message
        assert ", qwen3-4b," in message
        assert message.endswith("; did you mean qwen3-4b?")

    @pytest.mark.parametrize(("word", "hint"), [("gpu", ""), (3, ""), ("CUDA", "; did you mean cuda?")])
    def test_only_a_choice_that_is_near_is_suggested(self, word: object, hint: str):
        assert did_you_mean(word, ["auto", "cpu", "cuda"]) == hint


class TestConfigFile:
    def test_keys_at_the_top_or_in_their_table_with_dashes_or_underscores(self, tmp_path: Path):
        file = tmp_path / "run.toml"
        file.write_text(
            'lr = 1\nnum_rollout = 4\nlabel-key = "none"\n'
            '[staleness]\nmax-weight-staleness = 2\n[engines]\nsglang_mem_fraction_static = 0.8\n'
            "sglang-disable-cuda-graph = true\n"
        )  # fmt: skip
        arguments = parse("--config", str(file))
        assert (arguments.optimizer.lr, arguments.rollout.num_rollout) == (1.0, 4)
        assert arguments.data.label_key is None
        assert arguments.staleness.max_weight_staleness == 2
        assert arguments.engines.sglang_extra == ("--mem-fraction-static", "0.8", "--disable-cuda-graph")

    def test_several_values_one_text_or_none(self, tmp_path: Path):
        file = tmp_path / "run.toml"
        for text, words, data in [
            ('["aime", "a.jsonl"]', ["aime", "a.jsonl"], ("aime", "a.jsonl")),
            ('"a.jsonl"', ["a.jsonl"], ("a.jsonl",)),
            ('"none"', ["none"], None),
        ]:
            file.write_text(f"eval-prompt-data = {text}\n")
            assert parse("--config", str(file)).evaluation.eval_prompt_data == data
            assert parse("--eval-prompt-data", *words).evaluation.eval_prompt_data == data

    def test_command_line_wins_wherever_the_config_is_named(self, tmp_path: Path):
        file = tmp_path / "run.toml"
        file.write_text("lr = 1.0\nuse-wandb = true\nsglang-a = 1\n")
        arguments = parse("--lr", "2", "--no-use-wandb", "--sglang-a", "2", "--config", str(file))
        assert arguments.optimizer.lr == 2
        assert arguments.observability.use_wandb is False
        assert arguments.engines.sglang_extra == ("--a", "2")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("max-weight-stalenes = 2", "unknown key max-weight-stalenes; did you mean max-weight-st"),
            ("release-train = true", "release-train"),
            ("[staleness]\nlr = 1.0", "[staleness] lr: belongs to [optimizer]"),
            ("[stalenes]\nlr = 1.0", "there is no such table"),
            ("lr = 'fast'", "lr: expected a number, found 'fast'"),
            ("num-rollout = 1.5", "num-rollout: expected a whole number, found 1.5"),
            ("num-rollout = true", "num-rollout: expected a whole number, found True"),
            ("use-wandb = 1", "use-wandb: expected true or false, found 1"),
            ("device = 'gpu'", "expected one of auto, cpu, cuda"),
            ("advantage-estimator = 'Grpo'", "found 'Grpo'; did you mean grpo?"),
            ("rollout-stop = 3", "expected a list of texts"),
            ("lr = 1.0\n[optimizer]\nlr = 2.0", "given twice"),
            ("[engines]\nmegatron-bucket-size = 1", "[engines] megatron-bucket-size: unknown key"),
            ("sglang-x = {a = 1}", "expected true, a text, a number or a list"),
            ("lr = ", "cannot read"),
        ],
    )  # fmt: skip
    def test_bad_key_names_file_key_and_reason(self, tmp_path: Path, text: str, message: str):
        file = tmp_path / "run.toml"
        file.write_text(text)
        found = refusal("--config", str(file))
        assert str(file) in found
        assert message in found

    def test_missing_file_is_named(self):
        assert "there is no file absent.toml" in refusal("--config", "absent.toml")

    def test_printed_config_reads_back_equal(self, tmp_path: Path):
        arguments = parse(
            "--hf-checkpoint", 'models/with "quotes" \\ and é', "--lr", "1e-5", "--max-weight-staleness", "2",
            "--rollout-stop", "\n", "\x7f", "--no-progress", "--wandb-group", "none", "--ray-address", "auto",
            "--sglang-cuda-graph-bs-decode", "1", "2", "--sglang-disable-radix-cache", "--router-log-level=warn",
            "--megatron-bucket-size", "4096", "--megatron-moe-permute-fusion", "false", "--megatron-nccl-ub",
        )  # fmt: skip
        file = tmp_path / "printed.toml"
        file.write_text(to_toml(arguments))
        assert parse("--config", str(file)) == arguments
        file.write_text(to_toml(Arguments()))
        assert parse("--config", str(file)) == Arguments()


class TestPassThrough:
    def test_values_reach_sglang_and_the_router_without_the_prefix(self):
        engines = parse(
            "--sglang-cuda-graph-bs-decode", "1", "2", "--sglang-disable-radix-cache", "--lr=1", "--router-retries=3",
        ).engines  # fmt: skip
        assert engines.sglang_extra == ("--cuda-graph-bs-decode", "1", "2", "--disable-radix-cache")
        assert engines.router_extra == ("--retries", "3")

    def test_negative_numbers_are_values(self):
        assert parse("--sglang-x", "-1", "--lr", "1").engines.sglang_extra == ("--x", "-1")

    def test_a_repeated_flag_replaces_the_earlier_one(self):
        assert parse("--sglang-x", "1", "2", "--sglang-x", "3").engines.sglang_extra == ("--x", "3")

    def test_router_flags_that_are_ours_stay_ours(self):
        engines = parse("--sglang-router-policy", "random", "--sglang-router-port", "4000").engines
        assert (engines.sglang_router_policy, engines.sglang_router_port) == ("random", 4000)
        assert engines.sglang_extra == ()

    @pytest.mark.parametrize(
        ("flag", "advice"),
        [
            ("--router-port", "use --sglang-router-port"),
            ("--sglang-router-polcy", "did you mean --sglang-router-policy?"),
            ("--sglang-router-cache-threshold", "passed as --router-cache-threshold"),
        ],
    )
    def test_flags_that_the_run_decides_cannot_be_passed_through(self, flag: str, advice: str):
        assert advice in refusal(flag, "2")

    def test_flattening_is_reversible(self):
        collected = {"--sglang-a": ("1", "2"), "--sglang-b": (), "--router-c": ("x",), "--megatron-d": ("1",)}
        assert dict(unflatten(flatten(collected))) == collected


def explained(page: str) -> list[str]:
    """The flags that a page of the help explains."""
    return re.findall(r"^  (--[\w-]+)", page, flags=re.MULTILINE)


class TestHelp:
    @pytest.fixture
    def shown(self, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
        def shown(*words: str) -> str:
            with pytest.raises(SystemExit, match="0"):
                parse_arguments(words)
            return capsys.readouterr().out

        return shown

    def test_the_short_page_has_a_line_for_each_of_the_most_needed_flags(self, shown: Callable[..., str]):
        lines = shown("--help").splitlines()
        assert lines == shown("-h").splitlines()
        assert 60 <= len(lines) <= 80
        assert max(map(len, lines)) <= 80
        flags = [line.split()[0] for line in lines if line.startswith("  --") and "--help" not in line]
        assert set(flags) == {f"--{name.replace('_', '-')}" for name in MOST_NEEDED} | {"--config", "--dry-run"}
        assert len(flags) == len(set(flags))

    @pytest.mark.parametrize("name", ["prompts", "data", "Prompts"])
    def test_the_page_of_a_group_explains_all_its_flags(self, name: str, shown: Callable[..., str]):
        page = shown("--help", name)
        assert explained(page) == [one.flag for one in flag_specifications().values() if one.group == "data"]
        assert page.startswith("Prompts:")

    @pytest.mark.parametrize(
        ("words", "found", "absent"),
        [
            (["kl", "reward"], "--kl-coef", "--kl-loss-coef"),  # each of the words, in names or texts
            (["stale"], "--max-weight-staleness", "--kl-coef"),  # beginnings of words
            (["lr"], "--lr-warmup-iters", "--save"),  # not the "lr" of "already"
            (["grpo_std"], "--grpo-std-normalization", "--lr"),
        ],
    )
    def test_words_find_the_flags_that_have_them_all(
        self, words: list[str], found: str, absent: str, shown: Callable[..., str]
    ):
        flags = explained(shown("@preset:grpo", "--help", *words))
        assert found in flags
        assert absent not in flags

    def test_a_word_that_nothing_has_is_an_error_with_the_groups(self):
        assert "did you mean algorithm?; groups: cluster, model, prompts" in refusal("--help", "algoritm")

    def test_no_text_names_a_contract(self, shown: Callable[..., str]):
        assert not re.search(r"\b[ACM]\d+\b", shown("--help-all"))

    def test_everything_has_every_group_flag_and_default(self, shown: Callable[..., str]):
        text = shown("--help-all")
        for specification in flag_specifications().values():
            assert specification.flag in text
        for dataclass in argument_groups().values():
            assert inspect.cleandoc(dataclass.__doc__ or "") in text
        assert "(default: 8)" in text
        assert "Examples:" in text

    def test_switches(self):
        parsed = parse_arguments(["--dry-run", "--print-config"])
        assert parsed.dry_run
        assert parsed.print_config


def test_a_literal_is_a_flag_that_holds_one_of_its_choices() -> None:
    specifications = flag_specifications()
    assert specifications["pause_generation_mode"].choices == get_args(PauseMode)
    assert specifications["device"].choices == ("auto", "cpu", "cuda")  # a Literal of a Literal
    assert specifications["reasoning_parser"].optional  # or None
    assert specifications["reasoning_parser"].from_text("none") is None
    with pytest.raises(ValueError, match="expected one of abort, retract, in_place; found 'kill'"):
        specifications["pause_generation_mode"].from_text("kill")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--use-kl-loss", "false"], "--use-kl-loss is a switch without a value; --no-use-kl-loss turns it off"),
        (["--use-kl-loss=true"], "'true': --use-kl-loss is a switch without a value; --no-use-kl-loss turns it off"),
        (
            ["algorithm.adv_estimator=grpo"],
            "a key of verl, whose command lines `miles-async migrate SCRIPT` translates",
        ),
        (["+data.x.y=1"], "a key of verl"),
        (["run.toml"], "given as --config run.toml"),
        (["run.args"], "did you mean @run.args?"),
        (["–lr", "1"], "a dash that is no hyphen: --lr"),
        (["@run.toml"], "run.toml is TOML: give it as --config run.toml"),
        (["--config", "run.args"], "--config reads TOML: give the argument file as @run.args"),
        (["7"], "every value needs its flag before it"),
    ],
    ids=str,
)
def test_what_was_meant_is_said(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("lr = 1\n")
    with pytest.raises(ConfigurationError) as caught:
        parse_arguments(words)
    assert message in str(caught.value)


def test_tables_may_have_the_names_of_help(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[prompts]\nprompt-data = ["a.jsonl"]\n[Optimizer]\nlr = 0.5\n')
    arguments = parse_arguments(["--config", str(tmp_path / "run.toml")]).arguments
    assert (arguments.data.prompt_data, arguments.optimizer.lr) == (("a.jsonl",), 0.5)
