"""Makes what the quick start needs and the repository doesn't hold. Run from the repository root:

    python -m examples.quickstart.prepare [--task reverse|sort|all] [--output DIR] [--retrain]

Writes ``DIR/<task>/train.jsonl`` and ``test.jsonl`` (a second) and, where ``model/`` is absent or
``--retrain`` is given, warm-starts the model (about half a minute on one core). What is there is left alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.quickstart.tasks import TASKS, Task, write_jsonl

ASSETS = Path(__file__).parent / "assets"
MAX_SEEDS = 8
GATE_SAMPLES = 4  # per test prompt: 1,024 draws put the standard error of the sampled reward at about 0.01


def prepare(task: Task, directory: Path, *, retrain: bool = False) -> None:
    """Brings ``directory`` to hold train.jsonl, test.jsonl and model/."""
    train, test = task.split()
    for name, examples in (("train", train), ("test", test)):
        path = directory / f"{name}.jsonl"
        if not path.exists():
            write_jsonl(examples, path)
            print(f"{path}: {len(examples)} prompts")
    if retrain or not (directory / "model" / "config.json").exists():
        warm_start(task, directory / "model")


def warm_start(task: Task, directory: Path) -> None:
    """Trains with one seed after the other until the sampled reward is in the accepted range, and saves.

    Raises RuntimeError if no seed gets there.
    """
    import torch  # here and below: the usual call only writes data, and these imports take ten seconds

    from examples.quickstart.tokenizer import build_tokenizer
    from examples.quickstart.warm_start import accuracy, train_warm_start

    torch.set_num_threads(1)  # a model this small only loses by sharing its work
    tokenizer = build_tokenizer()
    _, test = task.split()
    lowest, highest = task.warm_start.accepted_reward
    seeds = range(task.warm_start.first_seed, task.warm_start.first_seed + MAX_SEEDS)
    for seed in seeds:
        model = train_warm_start(task, tokenizer, seed)
        sampled = accuracy(model, tokenizer, task, test, samples=GATE_SAMPLES)
        greedy = accuracy(model, tokenizer, task, test)
        accepted = lowest <= sampled <= highest
        verdict = "accepted" if accepted else f"outside {lowest}-{highest}, next seed"
        print(f"{task.name}, seed {seed}: sampled {sampled:.3f}, greedy {greedy:.3f}: {verdict}", flush=True)
        if accepted:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            return
    raise RuntimeError(
        f"no warm start of {task.name!r} reached a sampled reward in [{lowest}, {highest}] with seeds "
        f"{seeds.start}-{seeds.stop - 1}: change its WarmStart in examples/quickstart/tasks.py"
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Data and models of the quick start.", allow_abbrev=False)
    parser.add_argument("--task", choices=(*TASKS, "all"), default="all", help="what to prepare")
    parser.add_argument("--output", type=Path, default=ASSETS, help="one folder per task is made below it")
    parser.add_argument("--retrain", action="store_true", help="warm-start again even if there is a model")
    options = parser.parse_args(arguments)
    for task in TASKS.values() if options.task == "all" else (TASKS[options.task],):
        prepare(task, options.output / task.name, retrain=options.retrain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
