"""What a run is on the machine: its directory, its processes, its Ray, its temporary files."""
