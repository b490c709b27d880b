"""A small HTTP service of one engine: pictures or KServe v2 tensors in, classes or tensors out."""
