"""Known messages, what caused them and what cures them: the table, its reader, and facts of this host."""
