"""`python -m geosharp` is the command `geosharp`."""

from geosharp.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
