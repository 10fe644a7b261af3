"""``--eval-config`` with real engines: settings of each data set, alone and during training.

# covers: R4
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from miles_async.samples.columns import SampleSummary
from miles_async.samples.reader import read_summaries, samples_files
from miles_async.types import Prompt, Sample
from tests.integration.real_run import QUICKSTART, real_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(420)]

PROMPTS, GREEDY = 24, 5
SECONDS = 300.0
TEST = QUICKSTART / "assets" / "reverse" / "test.jsonl"
MODEL = QUICKSTART / "assets" / "reverse" / "model"


async def enough(prompt: Prompt, sample: Sample) -> float:
    """Half a point per digit that is right: 1 for two of them."""
    return sum(a == b for a, b in zip(sample.text, prompt.label, strict=False)) / 2


async def ranked(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    """What exact_match gives, and 10 for each sample before it."""
    return [sample.reward + 10 * place for place, sample in enumerate(samples)]


ALONE = f"""
eval:
  defaults:
    max_response_len: 7
  datasets:
    - name: drawn
      path: {TEST}@[0:{PROMPTS}]
      rm_type: exact_match
      n_samples_per_eval_prompt: 4
      temperature: 1.0
      metadata_overrides: {{difficulty: hard}}
    - name: greedy
      path: {TEST}@[{PROMPTS}:{PROMPTS + GREEDY}]
      custom_rm_path: {__name__}:{enough.__name__}
      n_samples_per_eval_prompt: 1
      temperature: 0
      max_response_len: 3
    - name: grouped
      path: {TEST}@[0:{GREEDY}]
      rm_type: exact_match
      group_rm_path: {__name__}:{ranked.__name__}
      n_samples_per_eval_prompt: 3
"""
TRAINING = f"""
eval:
  datasets:
    - {{name: often, path: "{TEST}@[0:{PROMPTS}]", interval: 1, engines: train}}
    - {{name: seldom, path: "{TEST}@[{PROMPTS}:{2 * PROMPTS}]", interval: 2, engines: evaluation, temperature: 1.0}}
"""
FLEET = """
[groups.train]
engines = 1
[groups.judges]
role = "evaluation"
"""


def by_data_set(path: Path) -> dict[str, list[SampleSummary]]:
    found: dict[str, list[SampleSummary]] = defaultdict(list)
    for row in read_summaries(path):
        found[row.data_set or ""].append(row)
    return found


def test_each_data_set_has_its_own_reward_samples_temperature_and_limit(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    (tmp_path / "held_out.yaml").write_text(ALONE)
    words = ("eval", "--hf-checkpoint", str(MODEL), "--device", "cpu", "--rm-type", "math")
    words = (*words, "--eval-config", str(tmp_path / "held_out.yaml"))
    command = (*imported_reverse[: imported_reverse.index("train")], *words)
    with real_run(tmp_path / "run", command=command) as run:
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    (file,) = samples_files(run.run_dir)
    rows = by_data_set(file.path)
    counts = {"drawn": 4 * PROMPTS, "greedy": GREEDY, "grouped": 3 * GREEDY}
    assert {name: len(of_set) for name, of_set in rows.items()} == counts
    places = defaultdict(list)
    for row in rows["grouped"]:
        places[row.prompt_id].append(row.reward - float(row.response == row.label))
    assert all(sorted(each) == [0, 10, 20] for each in places.values())
    assert all(row.reward == float(row.response == row.label) for row in rows["drawn"])
    assert {json.loads(row.prompt_metadata)["difficulty"] for row in rows["drawn"]} == {"hard"}
    assert max(row.length for row in rows["drawn"]) > 3 == max(row.length for row in rows["greedy"])
    assert len({(row.prompt_id, row.response) for row in rows["drawn"]}) > PROMPTS, "samples at temperature 1 differ"
    rewards = {row.reward for row in rows["greedy"]}
    assert rewards <= {0.0, 0.5, 1.0, 1.5}
    assert rewards != {0.0}
    records = json.loads((run.run_dir / "evaluation.json").read_text())["data_sets"]
    assert {*records["drawn"]["estimates"]} == {"reward", "pass@1", "pass@2", "pass@4"}
    assert {*records["greedy"]["estimates"]} == {"reward", "pass@1"}
    for name, prompts in (("drawn", PROMPTS), ("greedy", GREEDY)):
        assert records[name]["prompts"] == prompts
        mean = sum(row.reward >= 1 for row in rows[name]) / len(rows[name])
        estimate = records[name]["estimates"]["pass@1"]
        assert estimate["mean"] == pytest.approx(mean)
        assert estimate["low"] <= mean <= estimate["high"]
        assert estimate["low"] < estimate["high"]
        assert f"{name}: {prompts} prompts, {len(rows[name])} samples" in run.output


@pytest.mark.long
def test_in_training_each_data_set_has_its_interval_and_engines(
    tmp_path: Path, imported_reverse: tuple[str, ...]
) -> None:
    for name, text in (("held_out.yaml", TRAINING), ("fleet.toml", FLEET)):
        (tmp_path / name).write_text(text)
    flags = ("--eval-config", str(tmp_path / "held_out.yaml"), "--server-groups", str(tmp_path / "fleet.toml"))
    flags = (*flags, "--eval-prompt-data", "none", "--eval-interval", "none", "--num-rollout", "3")
    with real_run(tmp_path / "run", *flags, "--actor-num-gpus-per-node", "1", command=imported_reverse) as run:
        assert run.wait(SECONDS) == 0, run.output
        run.assert_nothing_left()
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    for name, steps in (("often", [0, 1, 2, 3]), ("seldom", [0, 2, 3])):  # the last weights always
        of_set = [record for record in evaluations if f"eval/{name}/reward/mean" in record]
        assert [record["step"] for record in of_set] == steps
        for record in of_set:
            version = {record[f"eval/{name}/weight_version/{end}"] for end in ("min", "max")}
            assert version == {record["step"]}
            assert record[f"eval/{name}/samples"] == PROMPTS
    files = {file.step: by_data_set(file.path) for file in samples_files(run.run_dir) if file.kind == "eval"}
    assert {step: {*sets} for step, sets in files.items()} == {
        step: {"often"} if step == 1 else {"often", "seldom"} for step in range(4)
    }
    for name, engine in (("often", "train-0"), ("seldom", "judges-0")):
        rows = [row for sets in files.values() for row in sets.get(name, ())]
        assert {tuple(json.loads(row.metadata)["engines"]) for row in rows} == {(engine,)}
    assert run.summary["balanced"]
