"""Print the command that a Python launch script of miles would run, and do nothing else. Run where miles is installed:

    python miles_command.py scripts/run_qwen3_4b.py [ARGUMENTS OF THE SCRIPT] | miles-async migrate -

The script runs, but not its downloads, conversions and commands (miles' ``command_utils``). Some take ``train`` as an
argument. Flags that describe the model, which config.json does here, are missing.
"""

from __future__ import annotations

import importlib
import runpy
import sys

ACTIONS = ("exec_command", "convert_", "hf_download", "rsync_", "ssh_", "fp8_cast", "start_")


def nothing(*_: object, **__: object) -> str:
    return ""


def show(train_args: str, *_: object, train_script: str = "train.py", **__: object) -> None:
    print("python3", train_script, train_args.replace("\n", " "))


def main() -> None:
    utilities = importlib.import_module("miles.utils.external_utils.command_utils")
    for name in vars(utilities):
        if name.startswith(ACTIONS):
            setattr(utilities, name, nothing)
    utilities.execute_train = show  # type: ignore[attr-defined]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
