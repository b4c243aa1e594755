"""The tasks of the next family: longer answers in three grades of difficulty, each result stated once."""
