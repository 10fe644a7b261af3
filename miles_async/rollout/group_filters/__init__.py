"""Group filters (``--group-filter``): reasons not to train on a rewarded group. Each is one file and one row of
``registry.py``.

What was filtered is replaced by a fresh prompt. The ledger counts reasons, so they hold no numbers that differ from
group to group.
"""
