"""Which samples, in what order, with what randomness; a front to torch's DataLoader."""
