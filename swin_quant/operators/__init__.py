"""The operators that a model computes, before anything is quantized: traced, counted, looked up, replaced."""
