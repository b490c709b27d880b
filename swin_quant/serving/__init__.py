"""An engine behind HTTP: the KServe v2 protocol, pictures as they are, batches made of waiting requests."""
