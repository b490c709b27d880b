"""Pictures in, batches out: sources of pictures, transforms to tensors, and seeded samples."""
