"""``python -m fused_adamw``: the command line."""

from fused_adamw.cli import main

if __name__ == "__main__":
    main()
