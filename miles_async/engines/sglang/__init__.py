"""SGLang: how its servers are started, what is patched in them, and their HTTP API."""

# Names shared by our code outside and inside of a server's process.
HELD_WEIGHTS_VARIABLE = "MILES_ASYNC_HELD_WEIGHTS"  # set: the server can report the weights that it holds
WEIGHT_GROUP_SECONDS_VARIABLE = "MILES_ASYNC_WEIGHT_GROUP_SECONDS"  # deadline of weights' process groups
STREAM = "miles_async_stream"  # load_format of /update_weights_from_distributed: all buckets of all senders
