"""A run: its processes, its files, its flags, how it is made ready."""
