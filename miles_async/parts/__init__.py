"""Parts chosen by flags and put together, for each kind of process."""
