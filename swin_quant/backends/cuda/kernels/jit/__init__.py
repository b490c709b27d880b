"""The kernels in Triton. Only a launch imports them: Triton may be missing before, and reads TRITON_INTERPRET at
import."""
