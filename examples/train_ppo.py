"""PPO, or whatever algorithm the config names, from a YAML file: on one process, or on those that torchrun starts.

    python train_ppo.py --config config.yaml
    torchrun --nproc_per_node=8 train_ppo.py --config config.yaml trainer.total_steps=100

Under torchrun rank 0 runs the loop and the others are its workers: they stay inside ``from_config`` and leave there.
"""

from __future__ import annotations

import argparse
import logging
import sys

from verl.config import load_config
from verl.trainer.ppo_trainer import PPOTrainer


def main() -> int:
    """Train. Returns the exit code: 0, or 128 + signal after an interrupt."""
    parser = argparse.ArgumentParser(description="Train with reinforcement learning.")
    parser.add_argument("--config", required=True, help="YAML file, or the name of a built-in recipe")
    parser.add_argument("overrides", nargs="*", help="key.path=value ..., over the file")
    words = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    trainer = PPOTrainer.from_config(load_config(words.config, words.overrides))
    try:
        return trainer.run().exit_code
    finally:
        trainer.close()


if __name__ == "__main__":
    sys.exit(main())
