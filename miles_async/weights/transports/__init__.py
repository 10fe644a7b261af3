"""How staged weights reach the engines: the driver's half of each transport. Each implements WeightTransport.

Nothing here imports torch; what runs in the sending rank is in ``weights/senders``.
"""
