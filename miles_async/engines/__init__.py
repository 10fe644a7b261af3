"""SGLang servers and their router: ``fleet`` keeps them alive, ``client`` sends requests, ``stack`` is all of it."""
