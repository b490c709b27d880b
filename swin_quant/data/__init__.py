"""Pictures in, batches out: where pictures come from, how each becomes a tensor, and which ones are taken."""
