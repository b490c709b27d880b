"""An engine behind HTTP: the KServe v2 protocol, picture files as they are, batches of waiting requests."""
