"""``--eval-config``: each held-out data set with its own settings; what is wrong is named by file, data set and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_async.arguments import Arguments, DataArguments, RewardArguments, RolloutArguments
from miles_async.arguments.evaluation import EvaluationArguments
from miles_async.arguments.evaluation_sets import EvaluationSet, evaluation_sets
from miles_async.arguments.parser import parse_arguments
from miles_async.arguments.prompt_limit import prompt_limit
from miles_async.arguments.validation import COMMON_CHECKS, SAMPLED_CHECKS
from miles_async.errors import ConfigurationError

SLIME = """
eval:
  defaults:
    n_samples_per_eval_prompt: 2
    temperature: 0.7
    max_response_len: 100
  datasets:
    - name: aime
      path: data/aime.jsonl
      n_samples_per_eval_prompt: 16
      rm_type: math
      label_key: answer
      metadata_overrides: {split: test}
    - name: gsm
      path: /data/gsm.parquet@[0:10]
      temperature: 0
      n_samples_per_eval_prompt: 1
      stop: END
      interval: 5
    - name: code
      path: hf:owner/code:test
      custom_rm_path: hooks:tests_pass
      engines: train
"""


def sets(path: Path, content: str, **flags: object) -> tuple[EvaluationSet, ...]:
    path.write_text(content)
    return evaluation_sets(EvaluationArguments(eval_config=path, **flags))


def refusal(path: Path, content: str, **flags: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        sets(path, content, **flags)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "held_out.yaml"


def test_each_has_its_settings_then_the_defaults_then_the_flags(file: Path) -> None:
    flags: dict[str, object] = {"eval_top_p": 0.9, "eval_max_response_len": 7, "eval_interval": 3}
    aime, gsm, code = sets(file, SLIME, **flags)
    evaluation, rollout = EvaluationArguments(**flags), RolloutArguments()
    assert [each.samples(evaluation) for each in (aime, gsm, code)] == [16, 1, 2]
    common = {"top_p": 0.9, "top_k": -1, "max_new_tokens": 100}
    assert aime.sampling(evaluation, rollout) == {"temperature": 0.7, **common}
    assert gsm.sampling(evaluation, rollout) == {"temperature": 0.0, "stop": ["END"], **common}
    assert [each.path for each in (aime, gsm, code)] == [
        str(file.parent / "data/aime.jsonl"),
        "/data/gsm.parquet@[0:10]",
        "hf:owner/code:test",
    ]
    assert (aime.metadata_overrides, code.engines, gsm.engines) == ({"split": "test"}, "train", None)


def test_columns_rewards_and_limits_are_its_own(file: Path) -> None:
    aime, gsm, code = sets(file, SLIME)
    data = DataArguments(prompt_data=("t.jsonl", "u.jsonl"), prompt_data_weights=("1", "2"), input_key="q")
    assert (aime.data(data).label_key, aime.data(data).input_key) == ("answer", "q")
    assert (gsm.data(data).label_key, gsm.data(data).prompt_data) == ("label", ("/data/gsm.parquet@[0:10]",))
    rewards = RewardArguments(rm_type="f1", rm_workers=3)
    assert (aime.rewards(rewards).rm_type, gsm.rewards(rewards).rm_type) == ("math", "f1")
    assert code.rewards(rewards) == RewardArguments(custom_rm_path="hooks:tests_pass", rm_workers=3)


def test_each_is_due_at_its_interval_and_all_at_both_ends(file: Path) -> None:
    aime, gsm, _ = sets(file, SLIME)
    evaluation = EvaluationArguments(eval_interval=3)
    assert [step for step in range(11) if aime.due(evaluation, step, last=step == 10)] == [0, 3, 6, 9, 10]
    assert [step for step in range(13) if gsm.due(evaluation, step, last=step == 12)] == [0, 5, 10, 12]
    never = EvaluationArguments()
    assert [step for step in range(11) if aime.due(never, step, last=step == 10)] == [0, 10]


def test_without_a_temperature_one_sample_is_greedy_and_several_are_not() -> None:
    rollout, evaluation = RolloutArguments(rollout_temperature=0.8), EvaluationArguments()
    one, two = (EvaluationSet(name="a", path="a.jsonl", n_samples_per_eval_prompt=n) for n in (1, 2))
    assert one.temperature_in_force(evaluation, rollout) == 0.0
    assert two.temperature_in_force(evaluation, rollout) == 0.8
    assert two.temperature_in_force(EvaluationArguments(eval_temperature=0.3), rollout) == 0.3


def test_json_and_an_object_of_data_sets_do_as_well(tmp_path: Path) -> None:
    content = {"datasets": {"aime": {"path": "a.jsonl"}, "gsm": {"path": "./folder/"}}}
    found = sets(tmp_path / "h.json", json.dumps(content))
    assert [(each.name, each.path) for each in found] == [
        ("aime", str(tmp_path / "a.jsonl")),
        ("gsm", f"{tmp_path}/./folder/"),
    ]


def test_data_sets_of_flags_come_with_those_of_the_file(file: Path) -> None:
    found = sets(file, SLIME, eval_prompt_data=("held_out", "t.jsonl"))
    assert [each.name for each in found] == ["held_out", "aime", "gsm", "code"]
    assert "gsm is the name of two data sets" in refusal(file, SLIME, eval_prompt_data=("gsm", "t.jsonl"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"temprature": 1}, "datasets[0] (a): unknown key 'temprature'; did you mean temperature?"),
        ({"zzz": 1}, "datasets[0] (a): unknown key 'zzz'; known are name, path, input_key"),
        ({"temperature": "hot"}, "datasets[0] (a): temperature: Expected `float | null`, got `str`"),
        ({"temperature": -1}, "datasets[0] (a): temperature: Expected `float` >= 0"),
        ({"top_p": 2}, "datasets[0] (a): top_p: Expected `float` <= 1"),
        ({"n_samples_per_eval_prompt": 0}, "n_samples_per_eval_prompt: Expected `int` >= 1"),
        ({"interval": 0}, "interval: Expected `int` >= 1"),
        ({"engines": "judge"}, "engines: Invalid enum value 'judge'"),
        ({"rm_type": "maths"}, "found 'maths'; did you mean math?"),
        ({"rm_type": "math", "custom_rm_path": "a:b"}, "rm_type and custom_rm_path: give one of them"),
        ({"custom_rm_path": "a.b"}, "custom_rm_path: expected module:attr, found 'a.b'"),
        ({"group_rm_path": "a.b"}, "group_rm_path: expected module:attr, found 'a.b'"),
        ({"min_new_tokens": 3}, "min_new_tokens does not exist here: an answer ends where the model ends it"),
        ({"path": "a.csv"}, "datasets[0] (a): path: expected a .jsonl (also .gz, .zst) or .parquet file"),
        ({"path": None}, "missing required field `path`"),
        ({"name": "a/b"}, "name: expected letters, digits and . - _, found 'a/b'"),
    ],
)
def test_every_wrong_key_is_named(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    found = refusal(file, json.dumps({"datasets": [{"name": "a", "path": "a.jsonl", **keys}]}))
    assert found.startswith(f"--eval-config {file}: datasets[0] (")
    assert message in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "expected a YAML or JSON file: "),
        ("", "expected eval: with datasets: in it, found None"),
        ("eval: {defaults: {}}", "expected eval: with datasets: in it"),
        ("eval: {datasets: [a]}", "datasets[0]: expected name, path and settings, found 'a'"),
        ("eval: {datasets: {aime: a.jsonl}}", "datasets[0]: expected name, path and settings, found 'a.jsonl'"),
        ("eval: {datasets: a}", "expected datasets to be a list, found 'a'"),
        ("eval: {dataset: [], datasets: [a]}", "expected defaults and datasets under eval, found dataset as well"),
        ("eval: {defaults: {name: a}, datasets: [{}]}", "defaults: unknown key 'name'"),
        ("eval: {datasets: [{path: a.jsonl}]}", "datasets[0]: Object missing required field `name`"),
    ],
)
def test_a_file_of_another_form_is_refused(content: str, message: str, file: Path) -> None:
    found = refusal(file, content)
    assert found.startswith(f"--eval-config {file}: ")
    assert message in found


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--eval-config .*h\.yaml: expected a YAML or JSON file: .*No such"):
        evaluation_sets(EvaluationArguments(eval_config=tmp_path / "h.yaml"))


class TestChecks:
    def problems(self, file: Path, content: str, **groups: object) -> list[str]:
        file.write_text(content)
        arguments = Arguments(evaluation=EvaluationArguments(eval_config=file), **groups)
        found = [line for check in (*COMMON_CHECKS, *SAMPLED_CHECKS) for line in check(arguments)]
        return [line for line in found if "--eval-config" in line]

    def test_files_exist(self, file: Path) -> None:
        found = self.problems(file, SLIME, rewards=RewardArguments(rm_type="math"))
        assert found == [
            f"--eval-config {file.parent}/data/aime.jsonl: there is no such file",
            "--eval-config /data/gsm.parquet@[0:10]: there is no such file",
        ]

    def test_an_absent_file_of_an_example_is_made_by_its_program(self, file: Path) -> None:
        maker, made = file.parent / "prepare.py", file.parent / "assets" / "test.jsonl"
        maker.touch()
        (line,) = self.problems(file, f"datasets: {{a: {{path: {made}}}}}", rewards=RewardArguments(rm_type="math"))
        assert line == f"--eval-config {made}: there is no such file ({maker} makes it)"

    def test_several_greedy_samples_would_be_equal(self, file: Path) -> None:
        content = "datasets: {a: {path: hf:a, n_samples_per_eval_prompt: 4, temperature: 0}}"
        [found] = self.problems(file, content, rewards=RewardArguments(rm_type="math"))
        assert found.startswith(f"--eval-config {file}: a: n_samples_per_eval_prompt 4 with temperature 0, which is gr")

    def test_each_needs_a_reward(self, file: Path) -> None:
        own = "datasets: {a: {path: hf:a, rm_type: math}}"
        assert self.problems(file, own) == []
        [found] = self.problems(file, own.replace("}}", "}, b: {path: hf:b}}"))
        assert found.startswith("--eval-config without a reward")
        [found] = self.problems(file, "datasets: {a: {path: hf:a, rm_type: remote_rm}}")
        assert found == f"--eval-config {file}: a: --rm-type remote_rm asks a server: give --rm-url"


def test_its_limits_say_where_they_come_from(file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1000}')
    content = "datasets: {a: {path: hf:a, max_prompt_len: 50}, b: {path: hf:b, max_response_len: 990}}"
    file.write_text(content)
    words = ["--hf-checkpoint", str(tmp_path), "--eval-config", str(file), "--rollout-max-response-len", "100"]
    arguments = parse_arguments(words).arguments
    short, long = (prompt_limit(arguments, held_out) for held_out in evaluation_sets(arguments.evaluation))
    assert (short.tokens, short.reason) == (50, "max_prompt_len of a in --eval-config is 50")
    assert long.tokens == 10
    assert long.reason.startswith("max_response_len of b in --eval-config 990 leaves 10 of")
