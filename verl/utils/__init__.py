"""Import paths that users type; re-exports only."""
