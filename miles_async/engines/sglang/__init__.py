"""SGLang: how its servers are started, what is patched in them, and their HTTP API."""

# Names that our code outside of a server's process shares with our code inside of it.
HELD_WEIGHTS_VARIABLE = "MILES_ASYNC_HELD_WEIGHTS"  # set: the server can report the weights that it holds
WEIGHT_GROUP_SECONDS_VARIABLE = "MILES_ASYNC_WEIGHT_GROUP_SECONDS"  # deadline of weights' process groups
STREAM = "miles_async_stream"  # load_format of /update_weights_from_distributed: all buckets of all senders
