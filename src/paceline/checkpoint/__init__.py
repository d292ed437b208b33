"""What is kept of a training, written whole or not at all."""
