"""Checkpoints: written beside training, whole or not there at all, and read by any layout."""
