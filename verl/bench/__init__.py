"""Speed and memory on synthetic work: a training step (``step``), generation (``rollout``)."""
