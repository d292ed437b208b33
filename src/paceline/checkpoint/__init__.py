"""Checkpoints: written by all ranks, whole or absent, and read on any number of ranks."""
