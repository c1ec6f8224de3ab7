theirs = 1
