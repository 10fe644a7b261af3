"""What our code outside of a server's process and inside of it agree on."""

HELD_WEIGHTS_VARIABLE = "MILES_ASYNC_HELD_WEIGHTS"  # in the environment: the server can say what its model holds
WEIGHT_GROUP_SECONDS_VARIABLE = "MILES_ASYNC_WEIGHT_GROUP_SECONDS"  # members of a process group wait so long
HELD_WEIGHTS_ACTION = "held_weights"  # how its /weights_checker is asked
