"""`shm`: a torch.distributed backend for CPU ranks of one host, over shared memory."""
