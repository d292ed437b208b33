"""Where a run reports its numbers: files, terminal, TensorBoard, GPU monitor."""
