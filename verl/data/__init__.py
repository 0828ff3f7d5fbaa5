"""Files and data sets in, prompts as token ids out; supervised labels; the order of a run, stateless."""
