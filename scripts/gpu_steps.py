"""The steps of ``make gpu-hour``: runs of the quick start, the tests on a GPU, and what is read from them."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_async.commands.gpu_report import gpu_named
from miles_async.types import JsonObject
from scripts.gpu_calibration import for_plan
from scripts.gpu_model import Size, save_model, save_prompts
from tests.integration.real_run import RealRun, real_run
from tests.integration.tiny_models import save_tiny

ROOT = Path(__file__).resolve().parent.parent
Figures = Mapping[str, float | str | Sequence[JsonObject]]

NO_EVALUATION = ("--eval-prompt-data", "none", "--eval-interval", "none")
COLOCATED = (
    "--colocate", "--on-policy", "--weight-transport", "ipc", "--engine-max-restarts", "0",
    "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
)  # fmt: skip
"""Both sides on one GPU."""

FLOAT8_DIFFERENCE = 0.25
"""Largest mean difference of log-probs that rounding weights and activations to float8 explains."""

SMALL = Size(layers=2, hidden=64, ffn=128, heads=4, key_value_heads=2, head_dim=16, vocabulary=512)
QWEN3_06B = Size(layers=28, hidden=1024, ffn=3072, heads=16, key_value_heads=8, head_dim=128, vocabulary=151_936)


class Skipped(Exception):
    """The machine has not got what the step needs."""


class StepError(Exception):
    """What was expected, and what was found."""


@dataclass
class Bench:
    """The machine, and where results go."""

    device: str  # "cpu" or "cuda"
    gpus: int
    output: Path
    deadline: float = math.inf  # of the step that is being taken, by time.monotonic()

    @classmethod
    def here(cls, output: Path) -> Bench:
        import torch

        output.mkdir(parents=True)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls("cuda" if gpus else "cpu", gpus, output)

    @property
    def name(self) -> str:
        """Of the machine's devices."""
        return f"{self.gpus} × {_gpu_name()}" if self.device == "cuda" else "CPU (a rehearsal)"

    @property
    def left(self) -> float:
        """Seconds that the step still has."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def layout(self) -> tuple[str, ...]:
        """Flags that place a run of the quick start here; on a CPU it has them."""
        if self.device == "cpu":
            return ()
        if self.gpus == 1:
            return ("--device", "cuda", *COLOCATED)
        each = str(min(2, self.gpus // 2))
        return ("--device", "cuda", "--actor-num-gpus-per-node", each, "--rollout-num-gpus", each)

    @property
    def tolerance(self) -> float:
        """Relative difference of sums over a batch that rounding explains."""
        return 1e-3 if self.device == "cpu" else 0.05  # bf16

    def train(self, name: str, *flags: str, layout: Sequence[str] | None = None) -> RealRun:
        """Run the quick start with ``flags`` to its end."""
        with real_run(self.output / name, *(self.layout if layout is None else layout), *flags) as run:
            self.end(run)
        return run

    def end(self, run: RealRun) -> None:
        """Wait for the end of a run. Raises StepError unless it is a good one."""
        if code := run.wait(self.left):
            raise StepError(f"expected a run that ends well, found exit status {code}:\n{run.output[-2000:]}")

    def execute(self, name: str, *words: str, **environment: str) -> str:
        """Run a command in the tree; its output, which is also kept. Raises StepError unless it ends well."""
        path = self.output / f"{name}.log"
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=ROOT, env={**os.environ, **environment}, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(self.left)
            except BaseException:  # out of time, or Ctrl-C, which its session does not get
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        text = path.read_text(errors="replace")
        if code:
            raise StepError(f"{' '.join(words)}: exit status {code}:\n{text[-2000:]}")
        return text


def _gpu_name() -> str:
    """Name of the first GPU. PyTorch would initialise CUDA in this process, which takes memory that steps need."""
    return first_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "unknown GPU"


def first_line(*command: str) -> str:
    """First line of a command's output; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A rung of the ladder."""

    key: str  # of --only
    name: str
    limit: float  # seconds
    take: Callable[[Bench], Figures] = field(repr=False)
    needs_cuda: bool = False


def doctor(bench: Bench) -> Figures:
    text = bench.execute("doctor", "miles_async", "doctor", "--device", bench.device, "--run-dir", str(bench.output))
    return {"counts": text.strip().splitlines()[-1]}


def kernels(bench: Bench) -> Figures:
    return _gpu_tests(bench, "test_logprob_chunks.py", "test_transport.py")


def one_rank(bench: Bench) -> Figures:
    """On CUDA against transformers on the CPU; without it against float64."""
    if bench.device == "cuda":
        return _gpu_tests(bench, "test_one_rank.py")
    words = ("pytest", "-q", "tests/integration/test_gradient_norms.py", "-k", "one-rank/tied and not shared")
    return {"tests": bench.execute("one_rank", *words).strip().splitlines()[-1]}


def _gpu_tests(bench: Bench, *files: str) -> Figures:
    paths = [f"tests/gpu/{file}" for file in files]
    figures = bench.output / Path(files[0]).stem
    words = ("pytest", "-q", "-c", "tests/gpu/pytest.ini", *paths)
    text = bench.execute(figures.name, *words, GPU_FIGURES=str(figures))
    measured = [json.loads(path.read_text())["measured"] for path in figures.glob("*.json")]
    return {"tests": text.strip().splitlines()[-1], "measured": measured}


def engine_against_rank(bench: Bench) -> Figures:
    """Log-probs of the same weights on both sides; the default transport."""
    dumps = ("--save-debug-rollout-data", str(bench.output / "batch-{rollout_id}.parquet"))
    run = bench.train("engine", "--num-rollout", "2", *NO_EVALUATION, *dumps)
    row, limit = run.steps[0], (1e-4 if bench.device == "cpu" else 0.05)
    found = row["train/logprob_diff_mean"]
    if not found < limit:
        raise StepError(f"expected log-probs of engine and rank to differ by less than {limit:g}, found {found:g}")
    return {"mean difference": found, "largest": row["train/logprob_diff_max"], **_publication(run)}


def publication(transport: str) -> Callable[[Bench], Figures]:
    """Publish by ``transport``, and compare every element."""

    def take(bench: Bench) -> Figures:
        flags = ("--num-rollout", "2", *NO_EVALUATION, "--weight-transport", transport)
        return _publication(bench.train(transport, *flags))

    return take


def _publication(run: RealRun) -> Figures:
    row = _last_publication(run.steps)
    if not row["publish/compared_tensors"] or row["publish/incomparable_tensors"]:
        raise StepError(
            f"expected all tensors to be compared, found {row['publish/compared_tensors']} that were and "
            f"{row['publish/incomparable_tensors']} that were not"
        )
    return _times(row)


def _last_publication(rows: Sequence[JsonObject]) -> JsonObject:
    """The newest step with a publication: a run ends with the one after its last step, which has no row."""
    found = [row for row in rows if "publish/compared_tensors" in row]
    if not found:
        raise StepError("expected a step with a publication after it, found none")
    return found[-1]


def _times(row: Mapping[str, float]) -> Figures:
    sent = row["publish/bytes"] * row["publish/sent_fraction"] / 1e9
    return {
        "prepare, s": row["publish/prepare_seconds"],
        "pause, s": row["publish/pause_seconds"],
        "copy, s": row["publish/copy_seconds"],
        "GB/s": sent / max(1e-9, row.get("publish/send_seconds", math.inf)),
    }


def quick_start(bench: Bench) -> Figures:
    run = bench.train("quickstart")
    summary = run.summary
    if not (summary["balanced"] and summary["eval_reward_last"] > 0.9):
        raise StepError(f"expected an evaluation above 0.9 and balanced accounts, found {json.dumps(summary)}")
    return {name: summary[name] for name in ("wall_seconds", "eval_reward_last", "trainer_idle_fraction", "age_max")}


def real_lengths(bench: Bench) -> Figures:
    """Random weights in the size of Qwen3-0.6B, and answers of 2,048 tokens; on a CPU a rehearsal with a tiny one."""
    cuda = bench.device == "cuda"
    size, steps, length = (QWEN3_06B, 20, 2048) if cuda else (SMALL, 3, 64)
    model, prompts = bench.output / "model", bench.output / "prompts.jsonl"
    parameters = save_model(model, size)
    save_prompts(prompts, size, words=length // 8)
    run = bench.train(
        "real_lengths", *NO_EVALUATION, "--hf-checkpoint", str(model), "--prompt-data", str(prompts),
        "--num-rollout", str(steps), "--rollout-max-response-len", str(length), "--lr", "1e-6",
        "--rollout-batch-size", "16" if cuda else "4", "--n-samples-per-prompt", "8" if cuda else "4",
        "--max-tokens-per-gpu", str(8 * length), "--rm-type", "none", "--custom-rm-path", "scripts.gpu_model:parity",
    )  # fmt: skip
    speed = _speed(run.steps[1:], run.summary, parameters, ranks=_ranks(bench))
    start = {"start, s": run.summary["stage_seconds"]["start"]}
    if (gpu := gpu_named(bench.name)) is None:
        return {**speed, **start}
    seen = for_plan(run.run_dir, gpu)
    return {**speed, "MFU": seen["shares"]["mfu"], **start, "plan": [seen]}


def _ranks(bench: Bench) -> int:
    return 2 if bench.device == "cpu" else int(bench.layout[bench.layout.index("--actor-num-gpus-per-node") + 1])


def _speed(rows: Sequence[JsonObject], summary: JsonObject, parameters: int, ranks: int) -> Figures:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    tokens, seconds = median("train/tokens"), median("time/train_seconds")
    generated = median("response_length/mean") * median("train/sequences")
    return {
        "step, s": median("time/step_seconds"),
        "training, s": seconds,
        "tokens trained per s": tokens / seconds,
        "TFLOP/s per rank": 6 * parameters * tokens / seconds / ranks / 1e12,
        "tokens generated per s": generated / median("time/step_seconds"),
        "trainer idle": summary["trainer_idle_fraction"],
        "engines idle": summary["rollout_idle_fraction"],
        "age": median("age/mean"),
        **_times(_last_publication(rows)),
    }


def kill_engine(bench: Bench) -> Figures:
    """The others continue and it comes back; a run whose only engine shares a GPU restarts from its checkpoint."""
    saved = bench.output / "kill_checkpoints"
    restarts = ("--save", str(saved), "--load", str(saved), "--save-interval", "1", "--max-run-restarts", "1")
    flags = ("--num-rollout", "8", *NO_EVALUATION, *(restarts if bench.gpus == 1 else ()))
    with real_run(bench.output / "kill", *bench.layout, *flags) as run:
        run.wait_for_steps(2, bench.left)
        run.engine_processes()[0].kill()
        killed = time.monotonic()
        bench.end(run)
    summary = run.summary
    if not (summary["balanced"] and summary["ending"] == "finished" and run.steps[-1]["step"] == 8):
        raise StepError(f"expected 8 steps and balanced accounts, found {json.dumps(summary)}")
    return {"from the kill to the end, s": time.monotonic() - killed, "steps": 8}


def resume(bench: Bench) -> Figures:
    saved = ("--save", str(bench.output / "checkpoints"), *NO_EVALUATION)
    bench.train("saved", "--num-rollout", "3", *saved)
    run = bench.train("resumed", "--num-rollout", "5", "--load", str(bench.output / "checkpoints"), *saved)
    steps = [row["step"] for row in run.steps]
    if steps != [4, 5]:
        raise StepError(f"expected steps 4 and 5 after a checkpoint of step 3, found {steps}")
    return {"first step": 4, "start, s": run.summary["stage_seconds"]["start"]}


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "DP 2": (),
    "TP 2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PP 2": ("--pipeline-model-parallel-size", "2"),
    "CP 2": ("--context-parallel-size", "2"),
}
EXPERTS = ("--expert-model-parallel-size", "2")


def layouts(bench: Bench) -> Figures:
    """Every way to split a model against one rank, on a batch of the run before."""
    batch = bench.output / "batch-1.parquet"
    if bench.device == "cuda" and bench.gpus < 2:
        raise Skipped("expected 2 GPUs, found 1")
    if not batch.exists():
        raise StepError(f"expected {batch}, which the step `engine` writes: take that one, too")

    def grad_norm(name: str, ranks: int, flags: Sequence[str]) -> float:
        place = ("--device", bench.device, "--actor-num-gpus-per-node", str(ranks))
        data = ("--load-debug-rollout-data", str(batch), "--num-rollout", "1", *NO_EVALUATION)
        run = bench.train(name.replace(" ", "").lower(), *place, *data, *flags, layout=())
        return float(run.steps[0]["train/grad_norm"])

    expected = grad_norm("one rank", 1, ())
    found = {name: abs(grad_norm(name, 2, flags) / expected - 1) for name, flags in LAYOUTS.items()}
    mixture = ("--hf-checkpoint", str(_mixture(bench)))
    found["EP 2"] = abs(grad_norm("EP 2", 2, (*mixture, *EXPERTS)) / grad_norm("one rank EP", 1, mixture) - 1)
    if wrong := [name for name, difference in found.items() if not difference < bench.tolerance]:
        raise StepError(f"expected the gradient norm of one rank ({expected:g}), found another with {wrong}: {found}")
    return {"gradient norm": expected} | {f"{name}, relative": difference for name, difference in found.items()}


def float8(bench: Bench) -> Figures:
    """Engines with weights in float8 hold all that is sent, and log-probs are near the rank's."""
    sizes = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 256}
    flags = ("--rollout-quantization", "fp8", "--hf-checkpoint", str(_mixture(bench, "float8-mixture", **sizes)))
    run = bench.train("float8", "--num-rollout", "2", *NO_EVALUATION, *flags)
    found = run.steps[0]["train/logprob_diff_mean"]
    if not 0 < found < FLOAT8_DIFFERENCE:
        raise StepError(f"expected log-probs to differ by less than {FLOAT8_DIFFERENCE:g}, found {found:g}")
    return {"mean difference": found, "largest": run.steps[0]["train/logprob_diff_max"], **_publication(run)}


def _mixture(bench: Bench, folder: str = "mixture", **sizes: int) -> Path:
    """A mixture of experts with the quick start's 64 tokens."""
    directory = save_tiny(
        "qwen3-moe", bench.output / folder, seed=0, dtype="float32", max_position_embeddings=128, **sizes
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source := ROOT / "examples/quickstart/assets/reverse/model" / name).exists():
            shutil.copy(source, directory)
    return directory


def colocated(bench: Bench) -> Figures:
    """Trainer and engine take turns on a GPU, and weights pass through its memory."""
    flags = ("--device", "cuda", *COLOCATED, "--num-rollout", "3", *NO_EVALUATION)
    return _publication(bench.train("colocated", *flags, layout=()))


STEPS = (
    Step(key="doctor", name="doctor", limit=180, take=doctor),
    Step(key="kernels", name="kernels and copies", limit=300, take=kernels, needs_cuda=True),
    Step(key="rank", name="one rank against the CPU's numbers", limit=600, take=one_rank),
    Step(key="engine", name="an engine's log-probs against the rank's", limit=600, take=engine_against_rank),
    Step(key="disk", name="publication by disk", limit=300, take=publication("disk")),
    Step(key="object", name="publication by object_store", limit=300, take=publication("object_store")),
    Step(key="ipc", name="publication by ipc, colocated", limit=300, take=colocated, needs_cuda=True),
    Step(key="float8", name="engines with float8 weights", limit=600, take=float8),
    Step(key="quick", name="the quick start", limit=600, take=quick_start),
    Step(key="lengths", name="real lengths", limit=1500, take=real_lengths),
    Step(key="kill", name="an engine is killed", limit=420, take=kill_engine),
    Step(key="resume", name="a run is resumed", limit=420, take=resume),
    Step(key="layouts", name="DP, TP, PP, CP, EP against one rank", limit=900, take=layouts),
)
