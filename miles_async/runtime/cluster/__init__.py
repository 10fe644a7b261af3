"""Ray: the cluster, its nodes, places on them, calls to actors."""
