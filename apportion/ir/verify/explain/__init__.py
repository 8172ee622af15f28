"""What is wrong with a program that the walk refused, in words."""
