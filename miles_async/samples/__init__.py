"""Samples of a run on disk: text, tokens and training's values for each, for people to read.

``columns`` says what a row holds, ``files`` where rows are, ``reader`` reads them. These need no torch and Ray.
"""
