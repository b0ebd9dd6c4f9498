"""`python -m genba.cli` is `genba`."""

from genba.cli import main

if __name__ == "__main__":
    main()
