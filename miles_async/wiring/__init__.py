"""The composition room: flags choose the parts of each kind of process, and they are put together here."""
