"""Forward passes and optimizer steps of one role over packed micro-batches."""
