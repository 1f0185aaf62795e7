"""`python -m traindiff`: the `traindiff` command."""

from traindiff.cli import main

if __name__ == "__main__":
    main()
