"""Transports: ways for staged weights to reach the engines. Each has two halves and a ``spec.TransportSpec``.

The driver's half is a ``seams.WeightTransport`` and imports no torch. The sending rank's half is a
``seams.WeightSender``. ``choice.py`` has the list, and makes both halves as the flags say.
"""
