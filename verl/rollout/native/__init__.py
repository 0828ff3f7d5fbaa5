"""The native rollout engine: continuous batching and a paged cache over the unmodified module."""
