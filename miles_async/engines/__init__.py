"""Inference servers and their router: ``server_process`` runs a server, ``supervisor`` keeps servers alive, ``fleet``
publishes to them, ``client`` sends requests, ``stack`` puts these together. ``sglang`` is the kind of server in use.
"""
