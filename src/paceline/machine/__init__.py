"""What this host has: cores, memory, shared memory, ports."""
