"""What a run would give on more nodes, before they are paid for."""
