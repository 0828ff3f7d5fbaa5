"""The metric keys that the console, the curves and the report look for. ``docs/metrics.md`` defines every key."""

SCORE = "reward/score/mean"
KL = "actor/kl"
TOKENS_PER_S = "perf/tokens_per_s"
STEP_S = "timing/step_s"

CURVES = {
    SCORE: "reward",
    "actor/margin": "margin",
    "reward_model/margin": "margin",
    "actor/loss": "loss",
}
"""What a run is judged by, with its short name: the first of these keys that its steps have."""

VALIDATION = "validation/"
"""What the keys of a validation begin with."""

VALIDATION_SCORE = "validation/score/mean"
