"""Which samples make each step, in which order and with which randomness; a front to torch's DataLoader."""
