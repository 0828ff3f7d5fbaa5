"""Scores to advantages to losses: tensor maths, one file an algorithm.

What comes in is a ``Batch`` (scores, masks, log-probs, values) and, inside the update, the padded columns of one
micro-batch. What goes out is advantages and a ``Loss`` of sum and count. Nothing here knows a process group, a
file, a model or the configuration of a run.
"""

from verl.common.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "ppo": "verl.algorithms.ppo:PPO",
        "grpo": "verl.algorithms.grpo:GRPO",
        "dr_grpo": "verl.algorithms.dr_grpo:DrGRPO",
        "rloo": "verl.algorithms.rloo:RLOO",
        "reinforce_pp": "verl.algorithms.reinforce_pp:ReinforcePP",
        "reinforce_pp_baseline": "verl.algorithms.reinforce_pp_baseline:ReinforcePPBaseline",
        "opo": "verl.algorithms.opo:OPO",
        "gspo": "verl.algorithms.gspo:GSPO",
        "cispo": "verl.algorithms.cispo:CISPO",
        "dapo": "verl.algorithms.dapo:DAPO",
        "remax": "verl.algorithms.remax:ReMax",
        "dpo": "verl.algorithms.dpo:DPO",
        "kto": "verl.algorithms.kto:KTO",
        "online_dpo": "verl.algorithms.online_dpo:OnlineDPO",
        "sft": "verl.algorithms.sft:SFT",
        "bradley_terry": "verl.algorithms.bradley_terry:BradleyTerry",
    },
)

__all__ = ["ALGORITHMS"]
