"""Checkpoints of the whole run: both sides and the loop's position in one directory, whole or absent.

::

    SAVE/iter_0000040/trainer/       weights, optimizer, scheduler, RNG (the backend's format)
    SAVE/iter_0000040/rollout.json   and groups.msgpack: the rollout side (``rollout/checkpoint.py``)
    SAVE/iter_0000040/position.json  step and weight version, and the run that saved them
    SAVE/iter_0000040/manifest.json  size and digest of each of these files, the model, the layout of ranks
    SAVE/save_lock.json              which run saves here now (``save_lock.py``)
    SAVE/readmit.json                prompts that get another budget at the next load (``ledger/readmission.py``)

A checkpoint is written to ``iter_0000040.partial`` and renamed when everything is on disk, so a directory with
the final name is whole. Finished groups that wait are saved with their tokens; what was in flight is generated again.

All checkpoints in one directory belong to one run, which resumes from the newest. A run takes over the directory that
it resumes from, and refuses one that holds other checkpoints, unless ``--save-overwrite`` replaces them.
"""
