"""What a run reports: JSON lines, terminal, TensorBoard, GPU utilization."""
