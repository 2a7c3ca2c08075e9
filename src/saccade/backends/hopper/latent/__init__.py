"""Latent attention over pages: decoding where the values are the first columns of the keys."""
