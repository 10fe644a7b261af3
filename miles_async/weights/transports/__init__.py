"""Transports: ways for staged weights to reach the engines. Each is a folder with both of its halves:

- ``driver.py``: the driver's half, a ``seams.WeightTransport``. It imports no torch.
- ``rank.py``: the sending rank's half, a ``seams.WeightSender``.
- ``__init__.py``: its row of the registry, a ``spec.TransportSpec``.

``registry.py`` has the rows, ``choice.py`` makes both halves as the flags say.
"""
