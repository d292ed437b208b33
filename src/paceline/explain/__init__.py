"""Known error messages: a table of their causes and fixes, its reader, and facts about this host."""
