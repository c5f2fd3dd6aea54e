"""`python -m layertap`: the command `layertap`."""

from layertap.cli import main

if __name__ == "__main__":
    main()
