"""The backward: kernels for head dims up to 128 and above, and the kernels before and after them."""
