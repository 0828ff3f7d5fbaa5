"""The driver loop, what it is assembled from, and what happens around it."""
