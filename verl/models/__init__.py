"""What transformers doesn't give: packed attention, value head, log-probs without the logits matrix, loading."""
