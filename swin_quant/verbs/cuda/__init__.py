"""Commands of the CUDA engine: what it can at best give on a GPU, and its fastest tiles on the GPU that is here."""
