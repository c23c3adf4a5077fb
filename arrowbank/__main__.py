"""``python -m arrowbank`` is the command ``arrowbank``."""

from arrowbank.cli import main

if __name__ == "__main__":
    main()
