"""A task of Harbor as an agent: `--agent-command "python -m examples.environments.harbor_agent"`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    task = json.load(sys.stdin)["metadata"]["task"]
    with tempfile.TemporaryDirectory() as trials:
        words = ["harbor", "trial", "start", "-p", task, "--trials-dir", trials]
        agent = ["-a", "terminus-2", "-m", "openai/policy"]  # the session is in OPENAI_BASE_URL
        subprocess.run([*words, *agent], stdout=sys.stderr, check=True)
        (result,) = (json.loads(path.read_text()) for path in Path(trials).glob("*/result.json"))
    rewards = (result["verifier_result"] or {}).get("rewards") or {}
    if "reward" not in rewards:  # no machine, or no verifier: the run waits and tries again
        print(f"{task} has no reward: {result['exception_info']}", file=sys.stderr)
        sys.exit(75)
    print(json.dumps([None, rewards["reward"]]))


if __name__ == "__main__":
    main()
