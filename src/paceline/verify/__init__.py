"""`paceline verify`: whether a script trains the same on 1 and on N processes."""
