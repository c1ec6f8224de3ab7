A = 1
B = 3
C = 3
D = 4
