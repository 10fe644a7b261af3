"""Files for clusters, as far as one machine tries them: the batch script with stand-ins for SLURM and Ray, and YAML."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import yaml

from miles_async.types import JsonObject

ROOT = Path(__file__).parents[3]
SBATCH = ROOT / "deploy" / "slurm" / "train.sbatch"
RAYJOB = ROOT / "deploy" / "kuberay" / "rayjob.yaml"
NETWORK_POLICY = ROOT / "deploy" / "kuberay" / "network-policy.yaml"

STAND_IN = """#!{python}
import json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
if name == "miles-async":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(130))
with open(os.environ["CALLS"], "a") as calls:
    seen = {{key: os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "ON_NODE")}}
    calls.write(json.dumps([name, sys.argv[1:], seen]) + "\\n")
{body}
"""
BODIES = {
    "scontrol": "print('node-a\\nnode-b\\nnode-c')",
    "hostname": "print('10.0.0.' + str(1 + 'abc'.index(os.environ.get('ON_NODE', 'node-a')[-1])) + ' 172.17.0.1')",
    # One task per node of the list, as SLURM does.
    "srun": """import subprocess
nodes = next(word.partition("=")[2] for word in sys.argv if word.startswith("--nodelist=")).split(",")
begin = next(i for i, word in enumerate(sys.argv) if word in ("bash", "ray"))
tasks = [subprocess.Popen(sys.argv[begin:], env={**os.environ, "ON_NODE": node}) for node in nodes]
sys.exit(max(task.wait() for task in tasks))""",
    "ray": "time.sleep(3)",
    # Nodes are up once `ray start` was called there; all else is Python's.
    "python": """if sys.argv[1].endswith("count_nodes.py"):
    print(sum(json.loads(line)[0] == "ray" for line in open(os.environ["CALLS"])))
else:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])""",
    "miles-async": "time.sleep(20 if '--forever' in sys.argv else 0)\nsys.exit(7)",
}


class Job:
    """The batch script, started as SLURM would."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._calls = directory / "calls"
        programs = directory / "bin"
        programs.mkdir()
        for name, body in BODIES.items():
            path = programs / name
            path.write_text(
                STAND_IN.format(python=sys.executable, body=body.replace("{python!r}", repr(sys.executable)))
            )
            path.chmod(0o755)
        slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node-[a-c]"}
        mine = {"MILES_ASYNC_BIN": str(programs), "CALLS": str(self._calls)}
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
        self.process = subprocess.Popen(["bash", str(SBATCH), *arguments], env={**inherited, **slurm, **mine})

    def calls(self, name: str) -> list[tuple[list[str], dict[str, str | None]]]:
        """Arguments and environments of the calls of a program."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [(arguments, seen) for program, arguments, seen in map(json.loads, lines) if program == name]


def test_the_batch_script_starts_ray_on_every_node_and_the_run_on_the_first(tmp_path: Path) -> None:
    job = Job(tmp_path, "@my.args", "--run-dir", "a directory")
    assert job.process.wait(30) == 7  # that of the run
    starts = {seen["ON_NODE"]: arguments for arguments, seen in job.calls("ray")}
    assert set(starts) == {"node-a", "node-b", "node-c"}
    assert {"--head", "--node-ip-address=10.0.0.1", "--port=6379"} <= {*starts["node-a"]}
    assert {"--address=10.0.0.1:6379", "--node-ip-address=10.0.0.3"} <= {*starts["node-c"]}
    ((arguments, _),) = job.calls("miles-async")
    assert arguments == ["train", "--ray-address", "10.0.0.1:6379", "@my.args", "--run-dir", "a directory"]


def test_the_batch_script_keeps_rays_token_out_of_arguments(tmp_path: Path) -> None:
    # covers: C13
    job = Job(tmp_path)
    job.process.wait(30)
    calls = [call for name in BODIES for call in job.calls(name)]
    tokens = {seen["RAY_AUTH_TOKEN"] for _, seen in job.calls("ray") + job.calls("miles-async")}
    (token,) = tokens
    assert token
    assert len(token) >= 43
    assert {seen["RAY_AUTH_MODE"] for _, seen in job.calls("ray")} == {"token"}
    assert not [arguments for arguments, _ in calls if token in " ".join(arguments)]


def test_the_batch_script_hands_on_the_signal_that_the_time_is_up(tmp_path: Path) -> None:
    """Its status is the run's, also where the run ends before the script looks at it again."""
    job = Job(tmp_path, "--forever")
    deadline = time.monotonic() + 30
    while not job.calls("miles-async") and time.monotonic() < deadline:
        time.sleep(0.1)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(15) == 130


def assert_accepted(text: str) -> None:
    """Raise jsonschema.ValidationError for a name or type that the object's kind doesn't have, at any depth."""
    content = yaml.safe_load(text)
    schema = Path(__file__).with_name("schemas") / f"{content['kind']}.yaml"
    jsonschema.validate(content, yaml.safe_load(schema.read_text()))


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "kuberay").glob("*.yaml")), ids=lambda path: path.name)
def test_yaml_has_the_names_and_types_of_its_kind(path: Path) -> None:
    assert_accepted(path.read_text())


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (RAYJOB, "apiVersion: ray.io/v1", "apiVersion: ray.io/v1alpha1"),
        (RAYJOB, "backoffLimit: 3", "backoffLimit: none"),
        (RAYJOB, "mode: token", "mode: tokens"),
        (RAYJOB, "groupName: generate", "name: generate"),
        (RAYJOB, "mountPath: /shared", "mountpath: /shared"),
        (RAYJOB, "secretRef:", "secretref:"),
        (RAYJOB, "512Gi", "512GiB"),
        (RAYJOB, "claimName: ", "claim: "),
        (RAYJOB, "  resources: *eight_gpus", "  ressources: *eight_gpus"),
        (NETWORK_POLICY, "ingress:", "ingres:"),
        (NETWORK_POLICY, "namespaceSelector: {}", "namespaceSelector: []"),
        (NETWORK_POLICY, "job-name: miles-async", "job-name: [miles-async]"),
    ],
)
def test_a_misspelt_name_or_a_wrong_type_is_refused(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    with pytest.raises(jsonschema.ValidationError):
        assert_accepted(text.replace(before, after))


def job() -> JsonObject:
    content: JsonObject = yaml.safe_load(RAYJOB.read_text())
    return content["spec"]


def groups() -> list[JsonObject]:
    cluster = job()["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_ray_job_has_labels_where_kuberay_takes_them() -> None:
    assert all(group["labels"] and "labels" not in group["rayStartParams"] for group in groups())


def test_the_pods_of_the_ray_job_mount_all_their_volumes() -> None:
    for group in groups():
        for container in group["template"]["spec"]["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_the_network_policy_is_for_the_pods_of_the_ray_job() -> None:
    # covers: C13
    policy: JsonObject = yaml.safe_load(NETWORK_POLICY.read_text())
    (label,) = policy["spec"]["podSelector"]["matchLabels"].items()
    for group in groups():
        assert label in group["template"]["metadata"]["labels"].items()


def test_the_gpu_image_has_what_rays_job_server_needs() -> None:
    """Without these packages Ray starts its agents and dashboard without HTTP, which KubeRay's probes ask."""
    lock = (ROOT / "requirements" / "gpu.lock").read_text()
    for name in ("aiohttp-cors", "opencensus", "opentelemetry-exporter-prometheus", "prometheus-client"):
        assert re.search(rf"^{name}==", lock, re.MULTILINE), name


def test_the_ray_job_is_locked_and_holds_no_secret() -> None:
    # covers: C13
    assert job()["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert not re.search(r"(?i)(token|key|password)\s*[:=]\s*['\"]?\w{16,}", RAYJOB.read_text())


def test_the_ray_job_has_the_pinned_ray_and_gpus_for_all_engines() -> None:
    cluster = job()["rayClusterSpec"]
    lock = (ROOT / "requirements" / "requirements.lock").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in re.sub(r"^ray\[.*?\]", "ray", lock, flags=re.MULTILINE)
    words = shlex.split(job()["entrypoint"])
    flags = dict(pairwise(words))
    (workers,) = cluster["workerGroupSpecs"]
    assert int(flags["--rollout-num-gpus"]) == 8 * workers["replicas"]
    assert words[:2] == ["miles-async", "train"]
