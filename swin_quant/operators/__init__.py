"""What a model computes, operator by operator, before anything is quantized: traced, counted, looked up, replaced."""
