"""The roles of a run: actor, critic, reference, rollout. Thin glue over engines."""
