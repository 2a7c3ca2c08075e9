"""Device functions that the Triton and the Gluon kernels share: records, masks, scores, tiles."""
