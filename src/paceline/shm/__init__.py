"""A c10d backend for CPU tensors of ranks on one host: they meet in memory that all of them have mapped."""
