"""Registry, errors, files, seeds, section base: imports nothing else of this library."""
