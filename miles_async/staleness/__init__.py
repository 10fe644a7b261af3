"""The age bound and the bookkeeping that keeps it: versions, policy, admission, buffer, ledger, attempts,
events, and the pool that moves them together.

Read in that order. Pure Python and numpy: no Ray, no network, no wall clock, no asyncio, so that everything that
docs/architecture.md promises in C1–C6 can be checked here by property tests alone (``tests/property``).

::

    AttemptBook.issue ─► Admission.admit ─► (generate, reward) ─► StalenessBuffer.put ─► .cut(target) ─► train
         ▲                                                              │ stale                            │
         └──── AttemptBook.ended: retry, or a fresh prompt ◄────────────┴─── Admission.leave               │
                                                   Admission.trained, then .commit ◄───────────────────────┘

``Ledger`` sees every arrow and refuses an attempt that ends twice or never. Each arrow is also an event (``events``),
which observers of the pool write to disk (``ledger.writer``, ``ledger.schedule``).
"""
