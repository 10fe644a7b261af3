"""Imports of the rollout process and of engines' actors, for their fork server.

All but Ray, whose C++ core reads a worker's settings at import, and pyarrow, which starts threads. What Ray itself
imports may be here.
"""

# ruff: noqa: F401  (imported to be there)

import aiohttp
import google.protobuf.descriptor_pool
import jsonschema
import requests
import uvloop

import miles_async.engines.stack
import miles_async.evaluation.evaluator
import miles_async.ledger.schedule
import miles_async.ledger.writer
import miles_async.observability.logs
import miles_async.prompts.source
import miles_async.prompts.templates
import miles_async.rollout.manager
import miles_async.samples.recorder
import miles_async.wiring.decisions
import miles_async.wiring.engines
import miles_async.wiring.generation
