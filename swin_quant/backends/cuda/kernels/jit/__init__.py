"""The kernels in Triton. Imported by a launch alone: Triton need not be installed, and reads TRITON_INTERPRET then."""
