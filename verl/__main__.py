"""``python -m verl``: the command line."""

from verl.cli import main

if __name__ == "__main__":
    main()
