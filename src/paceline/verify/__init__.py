"""`paceline verify`: runs a script at several process counts and says whether they trained the same."""
