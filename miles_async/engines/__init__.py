"""Inference servers and their router: ``supervisor`` keeps them alive, ``fleet`` publishes to them, ``client`` sends
requests, ``stack`` is all of it. ``sglang`` is the kind of server that runs use.
"""
