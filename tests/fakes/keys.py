"""Keys for tests that open doors."""

from miles_async.runtime.network.keys import make_run_keys

KEYS = make_run_keys({})
OTHER_KEYS = make_run_keys({})  # another run's
