"""``miles-async migrate``: recipes of slime, miles and verl as flags of ``miles-async train``.

What slime and miles call a flag is understood by ``train`` itself (``arguments/foreign/``); this package reads shell
scripts, verl's configuration and the defaults that differ.
"""
