"""It says itself why it cannot train."""

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_world_size() < 2:
    sys.exit("this script needs at least 2 processes")
