"""`python -m scripts` runs the tool; the Makefile calls nothing else."""

from scripts.cli import main

if __name__ == "__main__":
    main()
