"""Token-in-token-out trajectories: messages become tokens by appending, and sampled tokens are never changed.

turn.py samples one turn over any number of publications, rendering.py turns the messages between two turns into
text, tree.py keeps the turns and turns them into samples. Pure: no process, network or clock.
"""
