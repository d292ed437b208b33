"""Where a run's figures go: files, terminal, TensorBoard."""
